"""The command line, the only place where all parts are composed.

Each verb has one file.
"""
