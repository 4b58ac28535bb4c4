// Counters to rates: what happened between two looks at the server.

/**
 * Quantile `q` of what came into a histogram between two looks (without `before`: ever), in
 * milliseconds; null if nothing did. Within a bucket values count as evenly spread, as in
 * Prometheus's histogram_quantile; above the last bound nothing is known but that bound.
 */
export function quantile(q, before, now) {
  if (!now) return null;
  const counts = now.counts.map((count, bucket) => count - (before?.counts[bucket] ?? 0));
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (total <= 0 || counts.some((count) => count < 0)) return null;
  let below = 0;
  const bucket = counts.findIndex((count) => (below += count) >= q * total && count > 0);
  if (bucket >= now.bounds.length) return 1000 * now.bounds.at(-1);
  const low = bucket > 0 ? now.bounds[bucket - 1] : 0;
  const part = (q * total - (below - counts[bucket])) / counts[bucket];
  return 1000 * (low + (now.bounds[bucket] - low) * part);
}

/** Points of the charts from two samples of /console/metrics; null where nothing happened. */
export function pointOf(before, now) {
  const { engine, gateway } = now;
  const old = before?.engine;
  const seconds = before ? now.time - before.time : 0;
  // A counter that fell belongs to a server that was restarted: no rate across that.
  const same = engine && old && seconds > 0 && engine.steps >= old.steps;
  const rate = (name) => (same ? (engine[name] - old[name]) / seconds : null);
  return {
    generated: rate("generated_tokens"),
    prompt: rate("prompt_tokens"),
    running: engine ? engine.running : null,
    waiting: engine ? engine.waiting + gateway.waiting : null,
    ...(before ? spread("first", before.latencies.first_token, now.latencies.first_token) : {}),
    ...(same ? spread("between", before.latencies.inter_token, now.latencies.inter_token) : {}),
  };
}

/** The percentiles that are shown: `name50` and `name95`. */
export function spread(name, before, now) {
  return { [`${name}50`]: quantile(0.5, before, now), [`${name}95`]: quantile(0.95, before, now) };
}

/** Share of looked-up prompt tokens that were cached, in percent; null before the first one. */
export function hitRate(engine) {
  return engine.prefix_query_tokens > 0 ? (100 * engine.prefix_hit_tokens) / engine.prefix_query_tokens : null;
}
