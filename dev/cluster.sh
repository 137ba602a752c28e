#!/bin/bash
# A cluster in a box: HOSTS machines on this one, with a network between them that is as slow as you like.
#
#     dev/cluster.sh 2 --rate 100mbit -- mpirun -n 4 ./train --zero 2
#
#       host1, 10.0.0.1            host2, 10.0.0.2
#     +------------------+       +------------------+     each host: a network namespace and a host name of its
#     |  rank 0  rank 1  |       |  rank 2  rank 3  |     own, so that MPI takes it for another machine. Cores,
#     |     \      /     |       |     \      /     |     memory and files are this machine's
#     |       eth0       |       |       eth0       |
#     +--------|---------+       +---------|--------+
#              |  up, down: --rate         |              a cable: a veth pair, with a token bucket at either end;
#     +--------|---------------------------|--------+     what travels is real TCP
#     |      host1         switch        host2      |     a switch: a Linux bridge
#     +---------------------------------------------+
#
# The command runs on host1, and its exit code is this script's; INT, TERM, HUP and USR1 are passed on to it. Ranks are
# spread evenly, neighbours side by side, as on a real cluster; a plain mpirun line needs no more words than there.
# --rate is what the wire carries each way, TCP/IP headers included. --counters FILE gets the bytes that each host has
# sent and received by the end: "host1 sent 123 received 456".
#
# Nothing has to be cleaned up: switch, cables, hosts, mounts and processes live in namespaces of this run alone, and
# the kernel takes them all back when its first process ends, even by kill -9. Any number of clusters run side by side.
# Who is not root gets a user namespace, where the system allows that.
set -u
# Until the command runs. (Without this a shell forgets an INT that comes amid a step, and process 1 hears nothing.)
trap 'exit 1' INT TERM HUP

fail() {
    printf 'cluster.sh: %s\n' "$1" >&2
    exit 2
}

# Does one step of the set-up; where it fails, the step and its own last words are the line to print.
step() {
    local said
    said=$("$@" 2>&1) ||
        fail "'$*' failed (${said##*$'\n'}); it needs a Linux where you may make namespaces, with veth, bridge and tbf"
}

# Starts a command in the background, waits for it, and passes signals on to the process that `find` prints, as soon as
# it does. The command has a process group of its own (set -m), so that Ctrl-C comes once, through here, and not twice.
supervise() { # find, command…
    local find=$1 signal
    shift
    set -m
    "$@" </dev/null &
    job=$!
    for signal in INT TERM HUP USR1; do
        # shellcheck disable=SC2064 # now, not later
        trap "until kill -$signal \$($find) || ! kill -0 $job; do sleep 0.1; done 2>/dev/null" "$signal"
    done
    # A trap ends wait early. The shell's own words about a job that a signal has ended are not wanted.
    { while kill -0 "$job"; do wait "$job"; done; } 2>/dev/null
    wait "$job"
}

# ---- inside: what the first process of the new namespaces does -------------------------------------------------------
# Opens a host: its namespaces stay, as files. The cable's far end goes to the switch, where process 1 lives.
open_host() { # number
    local host=host$1
    touch "$box/$host.net" "$box/$host.uts"
    step unshare --net="$box/$host.net" --uts="$box/$host.uts" hostname "$host"
    step "$box/enter" "$host" "ip link set lo up && ip link add eth0 type veth peer name $host netns 1 &&
        ip address add 10.0.0.$1/24 dev eth0 && ip link set eth0 up"
    step ip link set "$host" master switch up
    echo "10.0.0.$1 $host" >>"$box/hosts"
    echo "$host slots=1" >>"$box/hostfile"
    [ -n "$rate" ] || return 0
    # A bucket of 5 ms: the kernel's timers are finer than that, and a short message already feels the rate. No
    # less than 32 kB, for a packet must fit. What waits longer than 100 ms is dropped, as by a switch.
    local burst=$((rate / 8 / 200))
    local bucket="root tbf rate ${rate}bit burst $((burst > 32768 ? burst : 32768)) latency 100ms"
    step "$box/enter" "$host" "tc qdisc add dev eth0 $bucket"
    # shellcheck disable=SC2086 # words
    step tc qdisc add dev "$host" $bucket
}

# Settings of Open MPI 4, then 5's names for them, by the environment: what the user's line says goes before them.
settings() {
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export OMPI_MCA_orte_default_hostfile=$box/hostfile PRTE_MCA_prte_default_hostfile=$box/hostfile
    export OMPI_MCA_plm_rsh_agent=$box/enter PRTE_MCA_plm_ssh_agent=$box/enter
    export OMPI_MCA_plm_rsh_no_tree_spawn=1 PRTE_MCA_plm_ssh_no_tree_spawn=1
    export OMPI_MCA_rmaps_base_mapping_policy=node:oversubscribe OMPI_MCA_rmaps_base_ranking_policy=slot
    export PRTE_MCA_rmaps_default_mapping_policy=node:oversubscribe PRTE_MCA_rmaps_default_ranking_policy=slot
    # Between hosts TCP over the cable, within a host shared memory; no other network that this machine may have.
    export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader,tcp OMPI_MCA_btl_tcp_if_include=eth0
    export OMPI_MCA_oob_tcp_if_include=eth0 PRTE_MCA_prte_if_include=eth0
    export OMPI_MCA_btl_vader_backing_directory=$box OMPI_MCA_btl_sm_backing_directory=$box TMPDIR=$box
    # The hosts share this machine's cores: nobody may own one, who waits must not keep it, and a rank has one thread
    # unless the user says more.
    export OMPI_MCA_hwloc_base_binding_policy=none PRTE_MCA_hwloc_default_binding_policy=none
    export OMPI_MCA_mpi_yield_when_idle=1
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
}

count() { # hosts
    local host
    for ((host = 1; host <= $1; host++)); do # /proc/net/dev: received in column 2, sent in 10
        "$box/enter" "host$host" cat /proc/net/dev |
            awk -v host="host$host" '$1 == "eth0:" {print host, "sent", $10, "received", $2}'
    done
}

inside() { # box, hosts, rate, counters, command…
    box=$1 rate=$3
    local hosts=$2 counters=$4 host code self
    shift 4
    # How the world outside calls this process: the old /proc still says it.
    read -r self _ </proc/self/stat
    echo "$self" >"$box/init"
    step mount -t proc proc /proc
    step mount -t tmpfs tmpfs "$box"
    # What mpirun takes for ssh: enter HOST COMMAND…
    cat >"$box/enter" <<-SCRIPT
	#!/bin/sh
	host=\$1
	shift
	exec nsenter --net="$box/\$host.net" --uts="$box/\$host.uts" -- sh -c "\$*"
	SCRIPT
    chmod +x "$box/enter"
    echo "127.0.0.1 localhost" >"$box/hosts"
    step ip link set lo up
    step ip link add switch type bridge
    step ip link set switch up
    for ((host = 1; host <= hosts; host++)); do open_host "$host"; done
    step mount --bind "$box/hosts" /etc/hosts
    settings
    # It says itself who it is: before that, as a copy of this shell, it would take a signal for this shell's, and forget it.
    # shellcheck disable=SC2016 # later
    supervise 'cat "$box/command"' nsenter --net="$box/host1.net" --uts="$box/host1.uts" -- \
        sh -c 'echo $$ >"$0"; exec "$@"' "$box/command" "$@"
    code=$?
    [ -z "$counters" ] || count "$hosts" >"$counters"
    exit $code
}

if [ "${1:-}" = --inside ]; then
    shift
    inside "$@"
fi

# ---- outside: flags, then the namespaces -----------------------------------------------------------------------------
usage="usage: dev/cluster.sh HOSTS [--rate 100mbit] [--counters FILE] -- mpirun -n RANKS ./train …"
hosts="" rate="" counters=""
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case $1 in
    --help)
        echo "$usage"
        exit 0
        ;;
    --rate)
        [[ ${2:-} =~ ^([1-9][0-9]{0,5})(kbit|mbit|gbit)$ ]] ||
            fail "--rate ${2:-}: a number and kbit, mbit or gbit, a second; nearest: --rate 100mbit"
        rate=${BASH_REMATCH[1]}
        case ${BASH_REMATCH[2]} in kbit) rate+=000 ;; mbit) rate+=000000 ;; gbit) rate+=000000000 ;; esac
        shift 2
        ;;
    --counters)
        counters=${2:-}
        { : >"$counters"; } 2>/dev/null || fail "--counters $counters: cannot write this file"
        shift 2
        ;;
    -*) fail "$1 is no flag; $usage" ;;
    *)
        [ -z "$hosts" ] || fail "$1 stands before --, after $hosts hosts; $usage"
        hosts=$1
        [[ $hosts =~ ^([1-9][0-9]?|1[0-9][0-9])$ ]] || fail "HOSTS $hosts: from 1 to 199; nearest: 2"
        shift
        ;;
    esac
done
[ -n "$hosts" ] || fail "how many hosts? $usage"
[ $# -gt 1 ] || fail "no command after --; $usage"
shift
PATH=$PATH:/usr/sbin:/sbin # ip and tc, for those who are not root
missing=""
for tool in hostname ip tc unshare nsenter setpriv mpirun; do command -v $tool >/dev/null || missing+=" $tool"; done
[ -z "$missing" ] || fail "missing:$missing; it needs Linux, hostname, iproute2, util-linux and Open MPI (make deps)"
command -v "$1" >/dev/null || fail "cannot find $1; $usage"

# Where the hosts keep their sockets and shared memory: one directory, in memory, seen from inside alone. Out here it is
# all but empty, and what a killed run could not remove, the next one does.
box=${TMPDIR:-/tmp}/ultrascale-cluster.$$
for old in "${box%.*}".*; do [ -d "/proc/${old##*.}" ] || rm -rf "$old"; done
rm -rf "$box"
namespaces="--net --mount --pid --fork --kill-child"
# shellcheck disable=SC2086 # words, here and below
unshare $namespaces true 2>/dev/null || namespaces="--user --map-root-user $namespaces"
# shellcheck disable=SC2086
step unshare $namespaces true
step mkdir -m 700 "$box"
# shellcheck disable=SC2016,SC2086
supervise 'cat "$box/init"' setpriv --pdeathsig KILL unshare $namespaces -- "$BASH" "$0" --inside \
    "$box" "$hosts" "$rate" "$counters" "$@"
code=$?
rm -rf "$box"
exit $code
