"""Ends with status 0 when the agent in this container says that it is well, else 1; needs no shell.

The address is that of /healthz, by default the one the agent listens on by default.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from http.client import HTTPException

DEFAULT_URL = "http://127.0.0.1:9753/healthz"
TIMEOUT_SECONDS = 4.0


def main() -> int:
    """Ask once; the answer, or why there is none, goes to standard output, where engines keep it."""
    url = os.environ.get("PREFETCHD_HEALTH_URL", DEFAULT_URL)
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:  # noqa: S310 - the operator's own address
            print(answer.read(200).decode(errors="replace").strip())
    except urllib.error.HTTPError as error:
        print(f"{url}: {error.code} {error.read(200).decode(errors='replace').strip()}")
        return 1
    except (OSError, ValueError, HTTPException) as error:  # nobody, an address that is none, or no agent
        print(f"{url}: {str(error).strip()}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
