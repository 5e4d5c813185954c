"""Pruning of the int8 KV cache: scores of a prompt's tokens, selection of the kept ones, and their compaction."""

from kvcompile.ops.prune.methods import METHODS, Method, Stage, parse_method
from kvcompile.ops.prune.op import prune_score
from kvcompile.ops.prune.op_move import prune_compact, prune_copy
from kvcompile.ops.prune.pages import pages_of
from kvcompile.ops.prune.selection import select, select_layers

__all__ = [
    "METHODS",
    "Method",
    "Stage",
    "pages_of",
    "parse_method",
    "prune_compact",
    "prune_copy",
    "prune_score",
    "select",
    "select_layers",
]
