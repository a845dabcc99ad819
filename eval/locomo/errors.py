"""The tree of this package's errors.

LocomoError
└── DatasetError             the data cannot be used
    ├── DatasetNotFoundError   no file there
    └── DatasetFormatError     a file, but not the schema
"""


class LocomoError(Exception):
    """Base of every error that this package raises."""


class DatasetError(LocomoError):
    """The data file cannot be used."""


class DatasetNotFoundError(DatasetError):
    """There is no data file at the path."""


class DatasetFormatError(DatasetError):
    """The file is not JSON or does not follow LoCoMo's schema."""
