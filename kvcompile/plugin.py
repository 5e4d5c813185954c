"""The `vllm.general_plugins` entry point: vLLM calls `register` once in every process that it starts."""


def register() -> None:
    """Install kvcompile's hooks into this process's vLLM. Idempotent; changes nothing until a user asks for kvcompile.

    vLLM logs and swallows an error raised while this module is *imported*, so everything that can fail is inside.
    """
    from kvcompile.integrations.vllm import compat

    compat.install()
