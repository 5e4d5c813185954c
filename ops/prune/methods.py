"""The pruning methods: what each ranks tokens by, with its paper and its parameters, and how one is found by name.

T tokens, W = window observation queries (the last of the prompt), H query heads, G KV heads, r = H / G, d head size.
Every method keeps the first `sink` tokens and the last `window` tokens; those between, [sink, T - W), are evictable and
ranked per KV head. A[i, t] is the softmax over the full causal row of scale * q_i . k_t, per query head.

`op.prune_score` computes the scores, `selection.select` turns them into the kept tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any, ClassVar

SCORE_PARAMETERS = ("sink", "kernel", "epsilon", "seed")  # those that scores depend on, beside the window


@dataclass(frozen=True)
class Stage:
    """One ranking by which tokens are taken; a method has one to three, each with its own scores [G, T].

    share: part of the evictable budget that this stage may take, in whole chunks; the last stage takes what is left.
    chunk: tokens that are taken together. reduce: score of a chunk from those of its tokens, "sum" or "max".
    """

    share: float = 1.0
    chunk: int = 1
    reduce: str = "sum"


@dataclass(frozen=True)
class Method:
    """What all methods have. A parameter out of range is a ValueError of one line."""

    window: int = 32  # last tokens of the prompt: their queries observe, and they are always kept
    sink: int = 4  # first tokens, always kept

    NAME: ClassVar[str]

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            kind, test, allowed = _ALLOWED[name]
            if isinstance(value, bool) or not isinstance(value, kind) or not test(value):
                raise ValueError(f"{self.NAME}: {name}: given {value!r}, allowed {allowed}")

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (Stage(),)

    @property
    def always_kept(self) -> int:
        """Tokens, the least that can be kept."""
        return self.sink + self.window

    @property
    def score_parameters(self) -> dict[str, Any]:
        """Keyword arguments of the operator `kvcompile::prune_score`."""
        return {name: getattr(self, name) for name in SCORE_PARAMETERS if hasattr(self, name)}


@dataclass(frozen=True)
class AnDPro(Method):
    """Z. Geng, J. Wang, Z. Liu, F. Ju, Y. Li, X. Li, M. Yuan, J. Hao, D. Lian, E. Chen, F. Wu: Accurate KV Cache
    Eviction via Anchor Direction Projection for Efficient LLM Inference. NeurIPS 2025.

    A'   = max_pool1d(A, kernel, stride 1) along t, over the whole row, per query
    Y[i] = sum over evictable t of A'[i, t] V[t]                    the anchor: the output before eviction
    s[t] = sum over i of A'[i, t] <Y[i], V[t]>                      summed over the r query heads of a KV head
    Chunks of `chunk` consecutive tokens, by the sum of their s.
    """

    kernel: int = 7
    chunk: int = 4

    NAME: ClassVar[str] = "andpro"

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (Stage(chunk=self.chunk, reduce="sum"),)


@dataclass(frozen=True)
class SnapKV(Method):
    """Y. Li, Y. Huang, B. Yang, B. Venkitesh, A. Locatelli, H. Ye, T. Cai, P. Lewis, D. Chen: SnapKV: LLM Knows What
    You Are Looking for Before Generation. NeurIPS 2024.

    s[t] = max_pool1d(mean over i of A[i, t], kernel, stride 1)     over t < T - W, as in the authors' code
    averaged over the r query heads of a KV head (the paper has one set per query head, which GQA cannot keep).
    """

    kernel: int = 7

    NAME: ClassVar[str] = "snapkv"


@dataclass(frozen=True)
class TOVA(Method):
    """M. Oren, M. Hassid, N. Yarden, Y. Adi, R. Schwartz: Transformers are Multi-State RNNs. EMNLP 2024.

    s[t] = mean over all H heads of the layer of A[last query, t]: every KV head keeps the same tokens.
    """

    NAME: ClassVar[str] = "tova"


@dataclass(frozen=True)
class Streaming(Method):
    """G. Xiao, Y. Tian, B. Chen, S. Han, M. Lewis: Efficient Streaming Language Models with Attention Sinks. ICLR 2024.

    s[t] = t: the sink and the most recent tokens. Reads neither queries nor cache.
    """

    NAME: ClassVar[str] = "streaming"


@dataclass(frozen=True)
class CriticalKV(Method):
    """Y. Feng, J. Lv, H. Guo, Y. Cao, X. Xie, S. K. Zhou: CriticalKV: Optimizing KV Cache Eviction from an Output
    Perturbation Perspective. arXiv:2502.03805, 2025. On SnapKV's scores a[t], as its CriticalSnapKV.

    First stage: the share `first_stage` of the budget by a[t]. Second: the rest by (a[t] + epsilon) * n[t],
    n[t] = || V[t] W_O ||_1, averaged over the r query heads, W_O the rows of the output projection for that head.
    Needs the projection's weight: see `output_weight` of `prune_score`.
    """

    kernel: int = 7
    first_stage: float = 0.5
    epsilon: float = 1e-4

    NAME: ClassVar[str] = "critical"

    @property
    def stages(self) -> tuple[Stage, ...]:
        return Stage(share=self.first_stage), Stage()


@dataclass(frozen=True)
class Random(Method):
    """A baseline: uniform over the evictable tokens, the same for every head and layer, a function of (seed, T) alone.

    s[t] = 24 bits of hash(hash(hash(seed) + T) + t), `positions.py`.
    """

    seed: int = 0

    NAME: ClassVar[str] = "random"


@dataclass(frozen=True)
class Blend(Method):
    """AnDPro where the prompt ends with what is asked, and not lost where it does not.

    First stage: the share `anchor` of the budget in whole chunks by AnDPro's sum. Second: the rest in chunks by the
    maximum of m[t] = mean over all H heads of the layer of A[last query, t], not pooled (TOVA's score).
    anchor = 1 is AnDPro but for the last, incomplete chunk.
    """

    kernel: int = 7
    chunk: int = 4
    anchor: float = 0.5

    NAME: ClassVar[str] = "blend"

    @property
    def stages(self) -> tuple[Stage, ...]:
        return Stage(share=self.anchor, chunk=self.chunk, reduce="sum"), Stage(chunk=self.chunk, reduce="max")


@dataclass(frozen=True)
class KeyDiff(Method):
    """J. Park, D. Jones, M. J. Morse, R. Goel, M. Lee, C. Lott: KeyDiff: Key Similarity-Based KV Cache Eviction for
    Long-Context LLM Inference in Resource-Constrained Environments. arXiv:2504.15364, 2025.

    s[t] = - cos(k_t, m)            m = mean over all T tokens of k_t / |k_t|, per KV head
    The keys least like the others. Reads no queries: it cannot be misled by where the question is.
    """

    NAME: ClassVar[str] = "keydiff"


@dataclass(frozen=True)
class Robust(Method):
    """The default: what the window asks about, what the last query looks at, and of what is left what is unlike others.

    First stage: the share `anchor` of the budget in whole chunks by AnDPro's sum. Second: the share `last` in whole
    chunks by the maximum of the mean over all H heads of the layer of A'[last query, t], pooled as for AnDPro. Third:
    what is left in chunks by the sum of the mean over the G KV heads of KeyDiff's s[t]. anchor + last is at most 1.
    """

    kernel: int = 7
    chunk: int = 4
    anchor: float = 0.3
    last: float = 0.5

    NAME: ClassVar[str] = "robust"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchor + self.last > 1:
            raise ValueError(f"robust: anchor + last: given {self.anchor} + {self.last}, allowed at most 1")

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (
            Stage(share=self.anchor, chunk=self.chunk, reduce="sum"),
            Stage(share=self.last, chunk=self.chunk, reduce="max"),
            Stage(chunk=self.chunk, reduce="sum"),
        )


METHODS: dict[str, type[Method]] = {
    method.NAME: method for method in (AnDPro, SnapKV, TOVA, Streaming, CriticalKV, Random, Blend, KeyDiff, Robust)
}


@cache
def stages_of(name: str) -> int:
    """How many rankings a method has, whatever its parameters."""
    return len(METHODS[name]().stages)


def parse_method(name: str, **parameters: Any) -> Method:
    """The method called `name` with its defaults, or with the `parameters` given.

    Raises ValueError, one line with what is allowed, for a name, a parameter or a value that does not exist.
    """
    if name not in METHODS:
        raise ValueError(f"pruning method: given {name!r}, allowed {', '.join(METHODS)}")
    known = [field.name for field in fields(METHODS[name])]
    for parameter in parameters:
        if parameter not in known:
            raise ValueError(f"{name}: given the parameter {parameter!r}, allowed {', '.join(known)}")
    return METHODS[name](**parameters)


_COUNT = (int, lambda x: x >= 1, "a whole number from 1")
_SHARE = ((int, float), lambda x: 0 <= x <= 1, "a number from 0 to 1")
_ALLOWED: dict[str, tuple[Any, Any, str]] = {
    "window": _COUNT,
    "sink": (int, lambda x: x >= 0, "a whole number from 0"),
    "kernel": (int, lambda x: x >= 1 and x % 2 == 1, "an odd whole number from 1"),
    "chunk": _COUNT,
    "first_stage": _SHARE,
    "anchor": _SHARE,
    "last": _SHARE,
    "epsilon": ((int, float), lambda x: 0 <= x < float("inf"), "a finite number from 0"),
    "seed": (int, lambda x: 0 <= x < 2**32, "a whole number from 0 to 4294967295"),
}
