# shellcheck shell=bash
# Sourced by quickstart.sh, test.sh and .ci/run: finds a Python, makes .venv at the root of the repository, installs cp_ring in it,
# and beside it other versions of megatron-core and torch for `test.sh --compat` and `test.sh --torch`.

ROOT="$(CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
export PIP_USER=0 # a site's pip may install into the home folder, which a virtual environment forbids
unset PIP_TARGET PIP_PREFIX

# Sets `cpu` to the CPU seconds (user and system) of all commands that this script has waited for.
# bash knows them in this shell alone, not in $(...).
cpu_seconds() {
    local file="$ROOT/.cache/times.$$" spent user system seconds
    mkdir -p "$ROOT/.cache"
    times >"$file"
    { read -r _; read -r user system; } <"$file"
    rm -f "$file"
    cpu=500 # milliseconds, to be rounded
    for spent in "${user%s}" "${system%s}"; do # 1m2.345
        seconds="${spent#*m}"
        cpu=$((cpu + 60000 * ${spent%m*} + 10#${seconds//[.,]/}))
    done
    cpu=$((cpu / 1000))
}

# Prints the first Python >= 3.12 that runs; the shim of a version manager can be on PATH and still fail.
find_python() {
    local candidate
    local pyenv="${PYENV_ROOT:-${HOME:-}/.pyenv}/versions"
    for candidate in python3.12 "$pyenv"/3.12*/bin/python3 python3.13 "$pyenv"/3.13*/bin/python3 python3; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "cp_ring: error: no Python >= 3.12 with venv runs here; install one (for example: apt-get install python3.12-venv)" >&2
    return 1
}

# A hash of the inputs of an environment. If it changes, the environment must be installed again.
environment_hash() {
    cat "$ROOT/pyproject.toml" "$ROOT/launch/constraints.txt" | sha256sum | cut -c1-16
}

# Of pip's output, a line for each package of more than a megabyte, and the beginning of the last part.
show_progress() {
    sed -un -e 's/^ *\(Downloading\|Using cached\) \([^ -]*\)-.* \(([0-9.]* [MG]B)\).*/cp_ring:   \2 \3/p' \
        -e 's/^Installing collected packages.*/cp_ring: all packages are here; unpacking them/p'
}

# prepare_environment EXTRAS, as "[test]" or "[megatron,tools]". Returns at once if .venv is complete; starts anew after an interrupted installation.
prepare_environment() {
    local extras="$1" stamp python old
    if [[ ! -e "$ROOT/pyproject.toml" ]]; then
        echo "cp_ring: error: this script sets up a checkout of cp_ring; where cp_ring is installed, run: cp-ring train quickstart" >&2
        return 1
    fi
    stamp="$VENV/complete-$(environment_hash)"
    if [[ (-e "$stamp$extras" || -e "${stamp}[test]") && -x "$VENV/bin/python" ]]; then # [test] holds what the others need
        return
    fi
    if [[ -e "$VENV/installing" ]]; then
        echo "cp_ring: the last installation was interrupted; making .venv anew"
        rm -rf "$VENV"
    fi
    if [[ ! -x "$VENV/bin/python" ]]; then
        python="$(find_python)" || return
        echo "cp_ring: making $VENV with $("$python" --version)"
        mkdir -p "$VENV"
        touch "$VENV/installing"
        "$python" -m venv "$VENV"
    fi
    echo "cp_ring: installing (torch and Megatron-core are large: one to three minutes, 5 GB)"
    touch "$VENV/installing"
    "$VENV/bin/python" -m pip install --disable-pip-version-check --no-color \
        --constraint "$ROOT/launch/constraints.txt" --editable "$ROOT$extras" | show_progress
    for old in "$VENV"/complete-*; do
        [[ "$old" == "$stamp"* ]] || rm -f "$old"
    done
    touch "$stamp" "$stamp$extras"
    rm -f "$VENV/installing"
}

# Programs that the tests need besides Python: Slurm, shellcheck, network namespaces.
TEST_PROGRAMS=(slurmctld slurmd srun munged shellcheck ip)
TEST_PACKAGES=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge shellcheck iproute2)

# Installs missing programs of the tests, if this is root with apt-get. Without a program, the tests that need it are skipped.
prepare_system() {
    local program missing=""
    for program in "${TEST_PROGRAMS[@]}"; do
        command -v "$program" >/dev/null || missing+=" $program"
    done
    if [[ -z "$missing" ]]; then
        return
    fi
    if [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
        echo "cp_ring: installing${missing} (for the tests)"
        export DEBIAN_FRONTEND=noninteractive
        if { apt-get -qq update; apt-get -qq install -y --no-install-recommends "${TEST_PACKAGES[@]}"; } >/dev/null </dev/null; then
            return
        fi
    fi
    echo "cp_ring: not installed, so that the tests that need them are skipped:${missing}" >&2
}

# Installs megatron-core VERSION, without its dependencies, into .compat/VERSION, once.
prepare_compat() {
    local version="$1" part
    if [[ -d "$ROOT/.compat/$version" ]]; then
        return
    fi
    part="$ROOT/.compat/.part-$version"
    rm -rf "$part"
    echo "cp_ring: installing megatron-core $version in .compat/$version"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$part" "megatron-core==$version"
    mv "$part" "$ROOT/.compat/$version"
}

# The newest release of Megatron Bridge, and of what it imports those that .venv has in other versions or not at all.
BRIDGE=(megatron-bridge==0.6.2 transformers==5.12.1 tokenizers==0.22.2 huggingface_hub==1.33.0 hydra-core==1.3.6 antlr4-python3-runtime==4.9.3
    peft==0.21.2 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 pandas==3.1.1 pyarrow==26.0.1 diffusers==0.42.1)

# Installs Megatron Bridge, without its other dependencies, into .compat/bridge, once.
prepare_bridge() {
    local part="$ROOT/.compat/.part-bridge"
    if [[ -d "$ROOT/.compat/bridge" ]]; then
        return
    fi
    rm -rf "$part"
    echo "cp_ring: installing Megatron Bridge in .compat/bridge (400 MB)"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$part" "${BRIDGE[@]}"
    mv "$part" "$ROOT/.compat/bridge"
}

# Installs torch VERSION, and the CUDA libraries that differ, into the virtual environment .compat/torch-VERSION, once.
# This environment uses .venv for everything else.
prepare_torch() {
    local version="$1" place="$ROOT/.compat/torch-$1" part="$ROOT/.compat/.part-torch-$1" below
    if [[ -d "$place" ]]; then
        return
    fi
    rm -rf "$part"
    echo "cp_ring: installing torch $version in .compat/torch-$version (5 GB)"
    "$VENV/bin/python" -m venv --without-pip "$part"
    below="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    echo "import site; site.addsitedir('$below')" >"$("$part/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
    "$VENV/bin/python" -m pip --python "$part/bin/python" install --quiet --disable-pip-version-check "torch==$version"
    mv "$part" "$place"
}
