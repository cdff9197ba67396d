# On the second disk of every machine; run at each boot, before sshd.
ip address add 10.0.2.15/24 dev eth0
ip link set eth0 up
ip address add "$(cat /opt/training-address)" dev eth1
ip link set eth1 up
# Debian keeps the kernel's log from all but root, and a log that cannot be read is no health: a node's owner has to decide that.
echo 0 > /proc/sys/kernel/dmesg_restrict
# A count of boots that relaunch has no hand in.
cat /proc/sys/kernel/random/boot_id >> /var/lib/boots
