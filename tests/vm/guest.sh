# Run inside the new root file system, as its root: makes of Debian's packages the machine that the suite reboots.
set -eu

# The user that relaunch logs in as; what it may do as root comes with the rest, from the documentation.
useradd --create-home --shell /bin/bash train

# What makes one machine another than the next comes on its second disk, a tar archive: keys, addresses, doubles.
cat > /etc/systemd/system/seed.service <<'END'
[Unit]
Description=What makes this machine itself
DefaultDependencies=no
After=systemd-remount-fs.service
Before=ssh.service basic.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=tar --extract --file /dev/vdb --directory /
ExecStart=/bin/sh -eu /opt/at_boot.sh

[Install]
WantedBy=basic.target
END
systemctl --quiet enable seed.service
printf 'UseDNS no\nHostKey /etc/ssh/ssh_host_ed25519_key\nPasswordAuthentication no\n' > /etc/ssh/sshd_config.d/suite.conf
rm -f /etc/ssh/ssh_host_*
: > /etc/machine-id

# An emulated processor boots Debian as it comes in 55 s of an idle core, most of them for hardware and people that this machine
# does not have. What stays is real: systemd, journald, sshd, sudo, and a shutdown that stops each of them.
units='apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer fstrim.timer systemd-tmpfiles-clean.timer
e2scrub_reap.service getty.target getty-static.service console-getty.service serial-getty@ttyS0.service systemd-logind.service
systemd-udevd.service systemd-udev-trigger.service systemd-udevd-control.socket systemd-udevd-kernel.socket
modprobe@configfs.service modprobe@dm_mod.service modprobe@drm.service modprobe@fuse.service modprobe@loop.service
modprobe@efi_pstore.service systemd-pstore.service kmod-static-nodes.service systemd-modules-load.service systemd-sysctl.service
dev-hugepages.mount dev-mqueue.mount sys-kernel-debug.mount sys-kernel-tracing.mount sys-kernel-config.mount
sys-fs-fuse-connections.mount proc-sys-fs-binfmt_misc.automount systemd-binfmt.service systemd-sysusers.service
systemd-repart.service systemd-firstboot.service systemd-machine-id-commit.service systemd-pcrphase.service
systemd-pcrphase-sysinit.service systemd-ask-password-console.path systemd-ask-password-wall.path systemd-fsckd.socket
systemd-initctl.socket systemd-journald-audit.socket cryptsetup.target integritysetup.target veritysetup.target
systemd-tmpfiles-setup-dev.service systemd-update-utmp.service systemd-update-utmp-runlevel.service'
systemctl --quiet mask $units
systemctl --quiet set-default multi-user.target
mkdir -p /etc/systemd/system-generators
for generator in /usr/lib/systemd/system-generators/*; do
    ln -s /dev/null "/etc/systemd/system-generators/${generator##*/}"
done

# Likewise Debian's initial file system takes 20 s; this one loads what finds the disk and the networks.
kernel=$(basename /lib/modules/*)
initrd=$(mktemp -d)
cd "$initrd"
mkdir -p bin dev proc root
cp /bin/busybox bin/
ln -s busybox bin/sh
depmod "$kernel"
for driver in virtio_pci virtio_blk virtio_net virtio_rng; do
    modprobe --show-depends --set-version "$kernel" "$driver"
done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' > order
{
    echo '#!/bin/sh'
    echo 'busybox mount -t devtmpfs dev /dev'
    while read -r module; do
        cp "$module" .
        echo "busybox insmod /${module##*/}"
    done < order
    # Before the kernel has seen the disk there is nothing to mount.
    echo 'while ! busybox mount -t ext4 /dev/vda /root; do busybox sleep 0.1; done'
    echo 'busybox mount --move /dev /root/dev'
    echo 'exec busybox switch_root /root /sbin/init'
} > init
chmod +x init
find . | cpio --quiet -o -H newc | gzip > /boot/initrd.suite
cd /
rm -r "$initrd"
