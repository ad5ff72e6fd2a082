"""Each ZeRO stage with ranks that have rows of their own and with ranks that share prompts, and
two families: `LAUNCHES[launch][job]`. What `make test` runs of the matrices."""

from tests.deepspeed.jobs import FAMILIES, STAGES, Cell, Job
from tests.deepspeed.sequence_jobs import PAIR

LAUNCH = "every stage"
CELL = Cell("full", "exact", "fp32", 1)
TRUTH = ("stage 0", str(CELL))

APART = {f"ZeRO-{stage}": Job(CELL.setting(), stage, same_as=TRUTH) for stage in STAGES}
SHARING = PAIR.named(
    {f"ZeRO-{stage}": PAIR.job(Job(CELL.setting(), stage), TRUTH) for stage in STAGES}
)
LAUNCHES: dict[str, dict[str, Job]] = {
    LAUNCH: {
        **APART,
        **SHARING,
        **{name: FAMILIES[name] for name in ("ZeRO-3, tied embeddings", "ZeRO-3, qwen3_5")},
    }
}
