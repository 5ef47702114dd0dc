#!/bin/bash
# Inside the guest, started by the boot: sets the machine up, then runs the commands that the host puts into the
# control folder as 0.run, 1.run, …; each leaves its output in N.out and its exit status in N.status.
control=$1 WRITABLE=$2 PROJECT=$3 CACHE=$4
. "$(dirname "$0")/guest_setup.sh"

serve() {
  local n=0 idle
  exec {idle}<> <(:) # reading from it with a time limit sleeps without a process
  while [ -d "$control" ]; do
    if [ ! -e "$control/$n.run" ]; then
      read -r -t 0.1 -u "$idle"
      continue
    fi
    bash "$control/$n.run" >"$control/$n.out" 2>&1 </dev/null
    echo $? >"$control/status.tmp"
    mv "$control/status.tmp" "$control/$n.status"
    n=$((n + 1))
  done
}

set_up
uname -r >"$control/ready.tmp"
mv "$control/ready.tmp" "$control/ready"
serve
