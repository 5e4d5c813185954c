"""Rotary embedding of a layer's queries and keys in one operator."""

from kvcompile.ops.rotary.op import rotary

__all__ = ["rotary"]
