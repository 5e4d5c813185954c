#!/bin/sh
# Print the path of the interpreter to make .venv with. Usage: find-python.sh [CANDIDATE...]
#
# Candidates are the arguments (`make setup PYTHON=...`), then what PATH offers. The first that runs, is Python 3.11 to
# 3.13 and can make environments wins. It is run, not only looked up: a version manager's shim exists without working.
# With none, one line on stderr and exit status 2.

# The base interpreter is named, not the one that ran: that may be the very .venv which is about to be replaced.
probe='
import sys
try:
    import ensurepip, venv
    able = "able"
except ImportError:
    able = "unable"
print("%d.%d" % sys.version_info[:2], able, getattr(sys, "_base_executable", None) or sys.executable)
'
given=$#
seen=
no_venv=
for candidate in "$@" python3 python3.13 python3.12 python3.11; do
    answer=$("$candidate" -I -c "$probe" 2>/dev/null) || answer=
    read -r version able path <<EOF
$answer
EOF
    case "$version" in
        3.11 | 3.12 | 3.13)
            if [ "$able" = able ]; then
                printf '%s\n' "$path"
                exit 0
            fi
            no_venv=${no_venv:-"$candidate (Python $version)"}
            fault="Python $version without the venv module"
            ;;
        "") fault="no Python 3 that runs" ;;
        *) fault="Python $version" ;;
    esac
    if [ "$given" -gt 0 ]; then
        given=$((given - 1))
        echo "kvcompile: PYTHON=$candidate is $fault; looking on PATH instead" >&2
    fi
    [ -z "$version" ] || seen="$seen${seen:+, }$candidate is $fault"
done

if [ -n "$no_venv" ]; then
    echo "kvcompile: $no_venv has no venv module; install it (Debian, Ubuntu: python3-venv) and run make again" >&2
else
    echo "kvcompile: needs Python 3.11 to 3.13 (${seen:-no python3 runs}); install one or name it: make setup PYTHON=PATH" >&2
fi
exit 2
