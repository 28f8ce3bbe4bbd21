"""Bytes per tier before anything is allocated: does a run fit this machine, or a described one?"""

from megatrain.plan.needs import Needs
from megatrain.plan.plans import Plan, plan, planned

__all__ = ["Needs", "Plan", "plan", "planned"]
