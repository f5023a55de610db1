#!/bin/sh
# mmdebstrap runs this for each image: customize.sh ROOT. The variables are those of Image.build in images.py.
#   OUT        receives the kernels as vmlinuz.NAME and their initrds as initrd.NAME
#   WHEELS     the packages that llmcache needs, for the Python of this image
#   KEY        the public key that may log in as root
#   BACKPORTS  the suite with a second kernel, or empty
set -eu
root=$1

# Copy the kernel that OUT lacks to OUT, as NAME.
take_kernel() {
    for kernel in "$root"/boot/vmlinuz-*; do
        version=${kernel##*/vmlinuz-}
        if grep -qsx "$version" "$OUT"/version.*; then continue; fi
        cp "$kernel" "$OUT/vmlinuz.$1"
        cp "$root/boot/initrd.img-$version" "$OUT/initrd.$1"
        echo "$version" >"$OUT/version.$1"
    done
}

take_kernel suite
if [ -n "$BACKPORTS" ]; then
    chroot "$root" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        -t "$BACKPORTS" linux-image-cloud-amd64 >/dev/null
    take_kernel backports
fi
rm -f "$root"/boot/vmlinuz-* "$root"/boot/initrd.img-*

# The guest installs the wheel of llmcache itself at boot; here are only the packages that it needs.
mkdir "$root/wheels"
cp "$WHEELS"/*.whl "$root/wheels"
chroot "$root" python3 -m venv /opt/llmcache
chroot "$root" sh -c '/opt/llmcache/bin/pip install -q --no-index --no-deps --no-cache-dir --disable-pip-version-check /wheels/*.whl'
rm -r "$root/wheels"

echo guest >"$root/etc/hostname"
printf '127.0.0.1 localhost guest\n' >"$root/etc/hosts"
mkdir -p "$root/root/.ssh" "$root/etc/systemd/network" "$root/data" "$root/srv/llmcache"
cp "$KEY" "$root/root/.ssh/authorized_keys"
chmod 700 "$root/root/.ssh"
chmod 600 "$root/root/.ssh/authorized_keys"
printf '[Match]\nName=eth0\n[Network]\nAddress=10.0.2.15/24\n' >"$root/etc/systemd/network/eth0.network"
printf 'UseDNS no\nLogLevel ERROR\n' >"$root/etc/ssh/sshd_config.d/guest.conf"
echo 'LABEL=DATA /data ext4 defaults,nofail 0 2' >>"$root/etc/fstab"
chroot "$root" useradd --create-home --shell /bin/bash tester
chroot "$root" systemctl enable -q systemd-networkd.service ssh.service
chroot "$root" systemctl mask -q apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer \
    e2scrub_reap.service fstrim.timer systemd-networkd-wait-online.service systemd-timesyncd.service getty.target
rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/*.bin
