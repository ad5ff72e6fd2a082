"""What an update takes, told from a model's `config.json` before anything is loaded.

    model_shape, parameters    the sizes of the model
    options                    what is to be run, on what
    terms                      bytes that are held, each with its arithmetic
    widths, layer_work         what a layer takes while it runs, by coefficients that were counted
    graph, phases              bytes of a pass, and what is there in each phase
    memory                     the most of it, and what fits
    times                      seconds, from rates
    small, measured            a small update like a planned one, run and counted (imports torch)
    count_work                 counts the coefficients anew (imports torch)

Knows shapes, bytes and rates; imports neither torch nor transformers but where it is said.
"""
