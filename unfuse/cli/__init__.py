"""The command line: one file per verb, and the only place where parts are put together."""
