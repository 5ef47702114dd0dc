#!/bin/bash
# The login shell of `python -m tests.lab shell`.
. "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/guest_setup.sh"
PROJECT=$PWD WRITABLE=
set_up
export PREFETCHD_LAB=1 HOME=/run/lab-home PYTHONDONTWRITEBYTECODE=1
lsblk -d -o NAME,ROTA,SIZE,SERIAL,MAJ:MIN
exec bash -i
