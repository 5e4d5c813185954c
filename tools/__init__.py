"""The subcommands: `kvcompile NAME` is the module NAME, with `add_arguments(parser)` and `run(args) -> exit code`."""
