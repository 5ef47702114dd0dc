"""All tests: unit (pure), native (this machine's kernel), lab (a guest with Debian's kernel)."""
