"""The command line, and the only place where all parts are composed; one file per verb."""
