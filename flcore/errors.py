"""The errors a user can cause or meet; each says what, where and what to do in one or two lines."""


class ProtoflError(Exception):
    """Base of every error that is shown without a traceback."""


class ConfigError(ProtoflError):
    """A configuration key, value or combination that cannot be run; raised before any data are read."""


class DataError(ProtoflError):
    """Data that are missing, damaged, or cannot be divided as asked."""


class RunError(ProtoflError):
    """A run that started and failed; names the round, the client and the stage."""
