"""Evaluations: functions of a frozen encoder that return numbers, and the pictures and pages that show them."""
