"""What holds for every test."""

import signal

# A shell that runs tests in the background has them ignore Ctrl-C, and all that they start as well: tests that send it
# to a child would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
