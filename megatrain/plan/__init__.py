"""Bytes per tier before anything is allocated: does a run fit this machine, or a described one?"""

from megatrain.plan.plans import Plan, plan, planned

__all__ = ["Plan", "plan", "planned"]
