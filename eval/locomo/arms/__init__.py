"""What is compared: ways to put facts of a conversation before a model, and the servers that do it."""

from locomo.arms.base import Answer, Scored, Selection, Served, System
from locomo.reporting.arm_names import ArmName, parse_arm

__all__ = ["Answer", "ArmName", "Scored", "Selection", "Served", "System", "parse_arm"]
