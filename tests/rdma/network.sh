# Two soft-RoCE devices, rxe0 with 10.7.0.1 and rxe1 with 10.7.0.2, on the two ends of a pair of virtual interfaces.
#
# Both ends stay in one network namespace, because this kernel's rxe listens only there. Policy routing sends what one
# end sends to the other over the wire, not over the loopback interface.
set -eu
ip link add va type veth peer name vb
number=0
for name in va vb; do
    number=$((number + 1))
    ip link set $name address 02:00:00:00:07:0$number mtu 4200 up
    ip addr add 10.7.0.$number/24 dev $name
    sysctl -qw net.ipv4.conf.$name.accept_local=1 net.ipv4.conf.$name.rp_filter=0 net.ipv4.conf.$name.arp_ignore=0
done
sysctl -qw net.ipv4.conf.all.rp_filter=0
ip neigh replace 10.7.0.2 lladdr 02:00:00:00:07:02 dev va
ip neigh replace 10.7.0.1 lladdr 02:00:00:00:07:01 dev vb
ip route add 10.7.0.2 dev va src 10.7.0.1 table 101
ip route add 10.7.0.1 dev vb src 10.7.0.2 table 102
ip rule add pref 1 iif va lookup local  # what arrives is for this host
ip rule add pref 2 iif vb lookup local
ip rule add pref 11 oif va lookup 101   # what rxe sends goes out through its own interface
ip rule add pref 12 oif vb lookup 102
ip rule add pref 100 lookup local
ip rule del pref 0
rdma link add rxe0 type rxe netdev va
rdma link add rxe1 type rxe netdev vb
for _ in 1 2 3 4 5 6 7 8 9 10; do
    grep -q ffff:0a07 /sys/class/infiniband/rxe0/ports/1/gids/1 && grep -q ffff:0a07 /sys/class/infiniband/rxe1/ports/1/gids/1 && break
    sleep 0.2
done
