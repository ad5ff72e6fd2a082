"""Every backward counts: mistakes that lose some of them are planted, and the comparison sees them.

DeepSpeed is made for one backward per forward through its engine. Driven otherwise it keeps what it
was told to keep, without a word: these are the ways in which it was seen to lose gradients, and
each is off by orders of magnitude more than the tolerance of `test_zero`. Should one of them become
harmless in a later DeepSpeed, the test fails and what guards against it may go.
"""

import pytest

from tests.deepspeed.compare import error_of
from tests.deepspeed.conftest import Launched, Truth
from tests.deepspeed.jobs import PLANTED, WITHOUT_ANCHOR
from tests.trl.parity import TOLERANCE
from tests.trl.ranks import RanksError

# A lost backward is a lost part of the gradient: of the order of its movement.
LOST = 1000 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_lost_backwards_are_seen(name: str, launched: Launched, truth: Truth) -> None:
    """The same comparison as in `test_zero`, on trainings that differ in the mistake only."""
    _, worst = error_of(launched("planted")[name][0], truth("planted", name))
    assert worst[0] > LOST, worst


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_ANCHOR)
def test_a_backward_without_an_anchor_raises(name: str, launched: Launched) -> None:
    """ZeRO-3 brings weights together at the top of the graph; a prompt's backward begins below."""
    with pytest.raises(RanksError, match="active_backward_submodules is empty"):
        launched(name)
