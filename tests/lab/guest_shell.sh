#!/bin/bash
# The login shell of `python -m tests.lab shell`, in the project's folder.
PROJECT=$1 CACHE=$2 WRITABLE=
. "$PROJECT/tests/lab/guest_setup.sh"
set_up
cd "$PROJECT"
export PREFETCHD_LAB=1 PREFETCHD_LAB_CACHE=$CACHE HOME=/run/lab-home PYTHONDONTWRITEBYTECODE=1
lsblk -d -o NAME,ROTA,SIZE,SERIAL,MAJ:MIN
exec bash -i
