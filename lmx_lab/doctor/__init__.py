"""What ``lmx-lab doctor`` looks at. Each finding says what is there, what that means, and what mends it."""

from lmx_lab.doctor.engines import examine_engines, import_failure
from lmx_lab.doctor.examination import examine
from lmx_lab.doctor.finding import Finding, Verdict

__all__ = ["Finding", "Verdict", "examine", "examine_engines", "import_failure"]
