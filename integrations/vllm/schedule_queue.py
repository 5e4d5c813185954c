"""vLLM's interface of a queue of waiting requests over the order of kvcompile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus

from kvcompile.schedule.waiting import WaitingOrder


class LengthQueue(RequestQueue):
    """Requests in the order of `WaitingOrder`.

    resident: the KV length of a request, in tokens: what it holds once its prompt is computed, and pruned if it is.
    """

    def __init__(
        self, order: WaitingOrder, block_tokens: int, resident: Callable[[Request], int], *, by_priority: bool
    ) -> None:
        self.order, self.block_tokens, self.resident, self.by_priority = order, block_tokens, resident, by_priority

    def add_request(self, request: Request) -> None:
        tokens = self.resident(request)
        self.order.add(
            request,
            tokens=tokens,
            blocks=-(-tokens // self.block_tokens),
            arrival=request.arrival_time,
            priority=request.priority if self.by_priority else 0,
            resumed=request.status == RequestStatus.PREEMPTED,
        )

    def peek_request(self) -> Request:
        return self.order.first()

    def pop_request(self) -> Request:
        request = self.order.first()
        self.order.remove(request)
        return request

    def prepend_request(self, request: Request) -> None:
        """vLLM puts preempted requests in front; the order does that itself."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Request) -> None:
        self.order.remove(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Those that do not wait here are passed by, as vLLM's own queues do."""
        for request in requests:
            if request in self.order:
                self.order.remove(request)

    def __bool__(self) -> bool:
        return len(self.order) > 0

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.order)
