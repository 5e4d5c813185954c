"""A vector ISA that once passed Inductor's check is not checked again by the next process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm.envs as envs
from torch._inductor.cpu_vec_isa import VecISA

from kvcompile.config import KVCompileConfig, to_dict
from kvcompile.integrations.vllm import vector_isa
from kvcompile.integrations.vllm.inductor_pass import KVCompilePass

AVX2, AVX512 = SimpleNamespace(_arch_flags="-mavx2"), SimpleNamespace(_arch_flags="-mavx512f")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str]]:
    monkeypatch.setattr(envs, "VLLM_CACHE_ROOT", str(tmp_path), raising=False)
    return []


def _check(asked: list[tuple[str, str]], answer: bool = True) -> Callable[[SimpleNamespace, str], bool]:
    def check_build(isa: SimpleNamespace, code: str) -> bool:
        asked.append((isa._arch_flags, code))
        return answer

    return vector_isa._remembering(check_build)


def test_a_positive_answer_is_asked_for_once_per_flags_and_code(asked: list[tuple[str, str]]) -> None:
    for _ in range(2):  # two processes
        check = _check(asked)
        assert check(AVX2, "a")
        assert check(AVX512, "a")
        assert check(AVX2, "b")
    assert asked == [("-mavx2", "a"), ("-mavx512f", "a"), ("-mavx2", "b")]


def test_a_negative_answer_is_asked_for_again(asked: list[tuple[str, str]]) -> None:
    assert not _check(asked, False)(AVX2, "a")
    assert _check(asked, True)(AVX2, "a")
    assert len(asked) == 2


def test_an_unwritable_cache_costs_the_memory_and_not_the_answer(
    asked: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kvcompile").write_text("a file where a folder should be")
    said: list[str] = []
    monkeypatch.setattr(vector_isa.logger, "warning", lambda message, *args: said.append(message % args))
    assert _check(asked)(AVX2, "a")
    assert len(said) == 1
    assert "cannot remember the vector ISA check" in said[0]


def test_the_pass_brings_the_memory_into_its_process_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VecISA, "check_build", VecISA.check_build)
    KVCompilePass(to_dict(KVCompileConfig()))
    wrapped = VecISA.check_build
    assert hasattr(wrapped, "__wrapped__")
    KVCompilePass(to_dict(KVCompileConfig()))
    assert VecISA.check_build is wrapped
