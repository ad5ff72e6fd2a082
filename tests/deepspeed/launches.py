"""All launches by name, `LAUNCHES[launch][job]`; tests and ranks look them up here."""

from tests.deepspeed.jobs import LAUNCHES as _DATA_PARALLEL
from tests.deepspeed.jobs import Job
from tests.deepspeed.qlora_jobs import LAUNCHES as _NF4
from tests.deepspeed.sequence_jobs import LAUNCHES as _SEQUENCE_PARALLEL
from tests.deepspeed.stage_jobs import LAUNCHES as _EVERY_STAGE

LAUNCHES: dict[str, dict[str, Job]] = {
    **_DATA_PARALLEL,
    **_SEQUENCE_PARALLEL,
    **_EVERY_STAGE,
    **_NF4,
}
