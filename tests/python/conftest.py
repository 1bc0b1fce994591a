"""For all tests."""

import signal

# A shell that is not interactive starts background jobs with SIGINT ignored (`make test &`), and so would be what the
# tests start: Ctrl-C is among what they try.
signal.signal(signal.SIGINT, signal.default_int_handler)
