// Whether the machine is busy: what two readings of its counters say.

/** `{busy, text}` of the time between two `machine` of /engine/stats, by its `busy_from`; null where too little is
 * counted. */
export function machineUse(before, now, busyFrom) {
  const seconds = now && before ? now.at_s - before.at_s : 0;
  if (!(seconds > 0)) return null;
  const change = (name) => (now[name] === null || before[name] === null ? 0 : Math.max(0, now[name] - before[name]));
  const others = (change("others_s") + change("stolen_s")) / seconds;
  const waited = change("waited_s") / Math.max(1e-9, change("waited_s") + change("ran_s"));
  const stopped = Math.max(change("stolen_s"), change("throttled_s")) / seconds;
  const busy = waited >= busyFrom.waiting && (others >= busyFrom.others || stopped >= busyFrom.taken);
  return { busy, text: `${others.toFixed(1)} of ${now.cpus}` };
}
