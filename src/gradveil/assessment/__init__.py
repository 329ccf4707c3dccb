"""An assessment: what is shared now, which defenses help, what they cost, and what to do.

It is made of other jobs: the doctor's checks, a training under each defense that goes on from the
given weights, and one audit of all of them. Its folder holds theirs, so it goes on after a stop.
"""

from gradveil.assessment.conclusions import Assessed, Assessment, conclude
from gradveil.assessment.job import AssessJob
from gradveil.assessment.run import assess, run_assessment

__all__ = ["AssessJob", "Assessed", "Assessment", "assess", "conclude", "run_assessment"]
