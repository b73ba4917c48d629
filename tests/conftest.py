"""For all tests: processes that a test starts can be interrupted, however the tests themselves were started."""

from __future__ import annotations

import signal

# A shell without job control starts background jobs with SIGINT ignored, and every process below would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
