#!/bin/bash
# In the guest, inside the server's network namespace (`ip netns exec`): serves EXPORT over NFS 3 and 4 until the mount
# daemon is ended. Nothing here is reachable from outside the guest.
set -eu
export_folder=$1 client=$2
mkdir -p /var/lib/nfs/{rpc_pipefs,nfsdcld,sm,sm.bak} /run/rpcbind
touch /etc/exports /var/lib/nfs/{etab,rmtab,state}
# Both are this namespace's own.
mount -t rpc_pipefs none /var/lib/nfs/rpc_pipefs
mount -t nfsd none /proc/fs/nfsd
rpcbind -f -w &
daemons=$!
nfsdcld --foreground & # knows that no client has anything to reclaim: without it opens wait for a grace period
daemons+=" $!"
trap 'rpc.nfsd 0; exportfs -au; kill $daemons; exit' EXIT
trap 'exit 0' TERM
exportfs -o rw,no_root_squash,insecure,no_subtree_check,async,fsid=0 "$client:$export_folder"
until (exec 3<>/dev/tcp/127.0.0.1/111) 2>/dev/null; do sleep 0.1; done
rpc.nfsd --lease-time 10 8
rpc.mountd --foreground &
daemons+=" $!"
touch "$3"
wait $!
