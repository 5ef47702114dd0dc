"""From a recording to one self-contained page: what happened, per job and device, with pictures that need no script."""
