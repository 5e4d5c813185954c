"""Which prompts are stored inline: their kept tokens alone, while they are computed, so that no page more is ever held.

Only a prompt that one step computes whole can be, and one of which nothing was found in the prefix cache. It leaves
nothing there either, and cannot go on unpruned if a layer's scores fail. So `auto` does it where nothing is cached
anyway, or where blocks are too short for the whole prompt; `always` uses no hits, and waits for a step with room.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcompile.prune.plan import Plan

TWO_PHASE, INLINE = False, True


@dataclass
class InlinePolicy:
    """mode: `prune.inline`. caching: whether prefixes are cached. step_tokens: most that a step computes of one prompt.
    most_held: most steps for which a prompt is not started because it would be split, and could be whole in another.
    """

    mode: str
    caching: bool
    step_tokens: int
    most_held: int
    _held: dict[str, int] = field(default_factory=dict)

    def possible(self, plan: Plan) -> bool:
        """Whether a step without others computes all of it."""
        return self.mode != "never" and plan.tokens <= self.step_tokens

    def uses_hits(self, plan: Plan) -> bool:
        return self.mode != "always" or not self.possible(plan)

    def ways(self, request_id: str, plan: Plan, new_tokens: int, hits: int) -> tuple[bool, ...]:
        """How to start a prompt of which this step would compute so many tokens, best first; none: not in this step."""
        if hits or not self.possible(plan):
            return (TWO_PHASE,)
        if new_tokens == plan.tokens:
            return (INLINE,) if self.mode == "always" or not self.caching else (TWO_PHASE, INLINE)
        held = self._held.get(request_id, 0)
        if self.mode == "always" and held < self.most_held:
            self._held[request_id] = held + 1
            return ()
        return (TWO_PHASE,)

    def forget(self, request_id: str) -> None:
        """It has ended or been preempted."""
        self._held.pop(request_id, None)
