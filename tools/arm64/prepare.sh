#!/usr/bin/env bash
# Makes an arm64 Python with the course's compiled kernels that runs on this x86 machine under
# qemu's user-mode emulation, in a folder of its own:
#
#     tools/arm64/prepare.sh FOLDER PYTHON      (PYTHON has pip, setuptools and Cython)
#
#   FOLDER/root      the distribution's arm64 python3, unpacked from its packages; apt keeps its
#                    lists and state in FOLDER/apt, so nothing of the machine's own changes
#   FOLDER/site      NumPy, pytest, ipykernel, ... as aarch64 wheels
#   FOLDER/lib       kernels_pyx.compiled, cross-compiled by setup.py
#   FOLDER/python-CPU           starts that Python on an emulated CPU; any CPU's name of qemu's
#   FOLDER/jupyter/kernels/...  a kernel for notebooks on each CPU
#
# The cross compiler and qemu are installed if missing and the user is root. A second call does
# only what changed. Exit code 77 and a last line that says why: it cannot be done here.
set -euo pipefail

CPUS="cortex-a76 cortex-a72"  # with and without the int8 dot product, SDOT
cross=${CROSS_CC:-aarch64-linux-gnu-gcc}
packages="numpy pytest hypothesis safetensors tokenizers jinja2 tqdm ipykernel ipywidgets matplotlib"

impossible() { echo "$1" >&2; exit 77; }

[ $# = 2 ] || { sed -n '2,4s/^# \?//p' "$0" >&2; exit 2; }
[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] ||
    impossible "emulated arm64 needs Linux on x86-64, and this is $(uname -s) on $(uname -m)"
python=$(command -v "$2") || { echo "$2 is no program" >&2; exit 2; }
mkdir -p "$1"
folder=$(realpath "$1")
checkout=$(realpath "$(dirname "$0")/../..")
log=$folder/log
exec 9>"$folder/lock"
flock 9
: >"$log"

failed() { tail -n 25 "$log" >&2; echo "$1 failed; log: $log" >&2; exit 1; }

# step LABEL COMMAND...: run it with its output in the log, or end.
step() {
    local label=$1
    shift
    echo "arm64: $label" >&2
    "$@" >>"$log" 2>&1 9>&- || failed "$label"
}

# stamped NAME VALUE: true if NAME was finished with this VALUE; stamp NAME VALUE: say so.
stamped() { [ "$(cat "$folder/$1.stamp" 2>/dev/null)" = "$2" ]; }
stamp() { printf '%s\n' "$2" >"$folder/$1.stamp"; }

host_programs() {
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null ||
        impossible "the arm64 Python comes from Debian's or Ubuntu's packages, and there is no apt"
    local missing=""
    command -v "$cross" >/dev/null || missing="gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
    command -v qemu-aarch64 >/dev/null || missing="$missing qemu-user"
    [ -n "$missing" ] || return 0
    [ "$(id -u)" = 0 ] || impossible "missing: sudo apt install$(printf ' %s' $missing)"
    export DEBIAN_FRONTEND=noninteractive
    step "apt-get update" apt-get update
    step "apt-get install$(printf ' %s' $missing)" \
        apt-get install -y --no-install-recommends $missing
}

# The machine's own package sources, asked for another architecture, by an apt that keeps all it
# writes in FOLDER/apt and believes that nothing is installed.
private_apt() {
    rm -rf "$folder/apt"
    mkdir -p "$folder/apt/state/lists/partial" "$folder/apt/cache/archives/partial"
    : >"$folder/apt/status"
    cat >"$folder/apt/apt.conf" <<END
Dir::State "$folder/apt/state";
Dir::State::status "$folder/apt/status";
Dir::Cache "$folder/apt/cache";
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Install-Recommends "false";
APT::Sandbox::User "";
Acquire::Languages "none";
END
}

arm64_apt() { APT_CONFIG=$folder/apt/apt.conf "apt-$1" "${@:2}"; }

unpack() {
    local package
    for package in "$folder"/apt/cache/archives/*.deb; do
        # Today's packages put everything under usr; ld.so is looked for in /lib.
        dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink -C "$1" || return 1
    done
}

arm64_root() {
    stamped root 1 && return
    private_apt
    step "apt-get update for arm64" arm64_apt get update
    local name
    name=$(arm64_apt cache depends python3 2>>"$log" | sed -n 's/^ *Depends: \(python3\.[0-9]*\)$/\1/p') ||
        name=""
    [ -n "$name" ] || impossible "this machine's package sources have no arm64 python3"
    step "arm64 $name from the distribution's packages" \
        arm64_apt get install -y --download-only "$name" libgomp1 libstdc++6
    # Only the headers of Python's development package, not all that it needs to be installed.
    (cd "$folder/apt/cache/archives" && arm64_apt get download "lib$name-dev") >>"$log" 2>&1 ||
        failed "lib$name-dev"
    rm -rf "$folder/root"
    rm -rf "$folder/sysconfig"
    mkdir -p "$folder/root/usr/lib" "$folder/sysconfig"
    ln -s usr/lib "$folder/root/lib"
    step "unpacking" unpack "$folder/root"
    # "_sysconfigdata__" + abi flags (none) + platform; some have two names for one file.
    cp "$(ls "$folder/root/usr/lib/$name"/_sysconfigdata__*aarch64-linux-gnu.py | head -n 1)" \
        "$folder/sysconfig/"
    rm -rf "$folder/apt/cache"
    stamp root 1
}

wheels() {
    local pins=() platforms=(--platform manylinux2014_aarch64) glibc minor wanted
    [ "$version" = 3.11 ] && pins=(-c constraints.txt)  # they are that Python's
    wanted="$packages $version $(sha256sum <constraints.txt)"
    stamped site "$wanted" && return
    glibc=$(strings_of_libc)
    for minor in $(seq 17 "$glibc"); do
        platforms+=(--platform "manylinux_2_${minor}_aarch64")
    done
    rm -rf "$folder/site"
    step "aarch64 wheels" "$python" -m pip install --disable-pip-version-check --no-input \
        --no-compile --target "$folder/site" --only-binary=:all: "${platforms[@]}" \
        --implementation cp --python-version "$version" "${pins[@]}" $packages
    stamp site "$wanted"
}

# The minor number of glibc 2.x, as its own library states it.
strings_of_libc() {
    grep -aom1 'GNU C Library .* release version 2\.[0-9]*' \
        "$folder/root/usr/lib/aarch64-linux-gnu/libc.so.6" | sed 's/.*\.//'
}

kernels() {
    local digest
    digest=$(find setup.py kernels_pyx -name '*.c' -o -name '*.h' -o -name '*.p[xy]*' -o -name setup.py |
        LC_ALL=C sort | xargs sha256sum | sha256sum)
    digest="$digest $($cross -dumpmachine) $($cross -dumpversion)"
    stamped lib "$digest" && return
    rm -rf "$folder/lib" "$folder/temp"
    # Cython runs here; everything that depends on the machine comes from the arm64 Python's own
    # build settings and headers. Which variants and flags: setup.py decides by the compiler.
    step "compiling the kernels with $cross" env \
        PYTHONPATH="$folder/sysconfig" _PYTHON_HOST_PLATFORM=linux-aarch64 \
        _PYTHON_SYSCONFIGDATA_NAME="$(basename "$folder"/sysconfig/*.py .py)" \
        CC="$cross" LDSHARED="$cross -shared" COURSE_REQUIRE_KERNELS=1 \
        CFLAGS="-Wall -I$folder/root/usr/include/python$version -I$folder/root/usr/include" \
        "$python" setup.py build_ext --build-lib "$folder/lib" --build-temp "$folder/temp"
    stamp lib "$digest"
}

starters() {
    local cpu kernel
    for cpu in $CPUS; do
        cat >"$folder/python-$cpu" <<END
#!/bin/sh
# Python on an emulated $cpu. A child process of it must be started by this file too.
unset PYTHONHOME LD_LIBRARY_PATH LD_PRELOAD
PYTHONPATH='$checkout:$checkout/tools/arm64:$folder/lib:$folder/site' PYTHONNOUSERSITE=1
PYTHONPYCACHEPREFIX='$folder/pycache' MPLCONFIGDIR='$folder/matplotlib'
export PYTHONPATH PYTHONNOUSERSITE PYTHONPYCACHEPREFIX MPLCONFIGDIR
exec qemu-aarch64 \$QEMU_OPTIONS -cpu $cpu -L '$folder/root' '$folder/root/usr/bin/python$version' "\$@"
END
        chmod +x "$folder/python-$cpu"
        kernel=$folder/jupyter/kernels/$cpu
        mkdir -p "$kernel"
        cat >"$kernel/kernel.json" <<END
{"argv": ["$folder/python-$cpu", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
 "display_name": "emulated $cpu", "language": "python"}
END
    done
}

host_programs
cd "$checkout"
arm64_root
version=$(basename "$folder"/root/usr/bin/python3.[0-9]*)
version=${version#python}
wheels
kernels
starters
