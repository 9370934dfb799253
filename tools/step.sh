#!/bin/sh
# Runs a command for make: prints what it is for, and every STEP_SECONDS (4) how long it has run and pip's last step.
# usage: step.sh LOG TEXT COMMAND [ARGUMENT ...], where pip writes its verbose log to the file LOG
log=$1 text=$2
shift 2
echo "$text"

beat() {
    seconds=0 shown=
    # The sleep must not keep the output open after the command; $$ is the script, which may be killed.
    while sleep 1 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        seconds=$((seconds + 1))
        [ $((seconds % ${STEP_SECONDS:-4})) = 0 ] || continue
        last=$(grep -Eo '(Collecting|Downloading|Using cached|Building|Installing collected) .*' "$log" 2>/dev/null |
            tail -n 1 | cut -c 1-90)
        # The same step once more needs only the time.
        if [ "$last" = "$shown" ]; then echo "  $seconds s"; else echo "  $seconds s: $last"; fi
        shown=$last
    done
}

rm -f "$log"
beat &
PIP_LOG=$log "$@"
status=$?
kill $!
exit $status
