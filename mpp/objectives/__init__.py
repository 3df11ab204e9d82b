"""Objectives: modules whose `forward(batch)` returns ``{"loss": scalar, name: scalar, ...}``. One file each."""
