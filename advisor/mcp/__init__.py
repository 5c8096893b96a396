"""Tools for coding agents (Model Context Protocol): what is slow, what a fix saves."""
