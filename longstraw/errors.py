"""The errors LongStraw raises. Each says what was found, what is needed and what to change."""


class LongStrawError(Exception):
    """Base of every error raised on purpose by LongStraw.

    Attributes:
        of_one_rank: whether one of several ranks that share a prompt can meet it alone. Others come
            from what all of them are given, or agree on.
    """

    of_one_rank = False


def is_of_the_group(error: BaseException) -> bool:
    """Whether all ranks that share a prompt raise it: not what a device or a library raises."""
    return isinstance(error, LongStrawError) and not error.of_one_rank


class ConfigError(LongStrawError, ValueError):
    """An option, or a combination of options, that cannot be honoured."""


class ShapeError(LongStrawError, ValueError):
    """Tensors or token sequences whose sizes do not fit together."""


class DataError(LongStrawError, ValueError):
    """A dataset row, a prompt or a reward that cannot be used."""


class UnsupportedModelError(LongStrawError, NotImplementedError):
    """A model that the engine does not serve; running it could be silently wrong."""


class PromptStateError(LongStrawError, RuntimeError):
    """Captured state used in a way that it does not allow."""


class StalePromptStateError(PromptStateError):
    """State captured with weights that the policy no longer has."""

    of_one_rank = True


class ReplayMismatchError(PromptStateError):
    """A replay that chose other tokens or experts than the capture it continues."""


class PageFileError(PromptStateError, OSError):
    """A file of captured state that cannot be made, written, or read back as it was written."""

    of_one_rank = True


class MemoryPlanError(LongStrawError, RuntimeError):
    """State that would not fit the byte budget."""


class PageRoomError(MemoryPlanError):
    """A page for which no room is left in the middle of an update, in memory or in files."""

    of_one_rank = True


class RanksAbortedError(LongStrawError, RuntimeError):
    """Work given up on this rank because another one failed in it."""


class RankLostError(LongStrawError, RuntimeError):
    """Other ranks stopped answering."""

    of_one_rank = True
