"""Charts and self-contained pages, from plain numbers, strings and images."""

from .page import GateLayer, Mistake, ReportData, write_report

__all__ = ["GateLayer", "Mistake", "ReportData", "write_report"]
