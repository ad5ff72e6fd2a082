"""What an update takes, told from a model's `config.json` before anything is loaded.

    model_shape, parameters    the sizes of the model
    options                    what is to be run, on what
    terms                      bytes that are held, each with its arithmetic
    memory                     their sum, and what fits

Knows shapes, bytes and rates; imports neither torch nor transformers.
"""
