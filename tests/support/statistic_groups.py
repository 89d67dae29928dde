"""The names of statistics by the kind of meter that measures them; test support."""

from compressor.statistics.meters import ExpertOutputs, Meter, Sample, Sum
from compressor.statistics.statistics import STATISTICS


def measured_by(kind: type[Meter]) -> frozenset[str]:
    """The names of the statistics that meters of this kind measure."""
    return frozenset(name for name, entry in STATISTICS.items() if entry.meter and issubclass(entry.meter, kind))


SUMS = measured_by(Sum)
DENSE = measured_by(ExpertOutputs)
SAMPLED = measured_by(Sample) - DENSE
