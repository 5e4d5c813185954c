"""Where kvcompile meets the engines that it extends."""
