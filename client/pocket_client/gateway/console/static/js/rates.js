// Counters to rates: what happened between two looks at the server.

/** Milliseconds of each, from a sum in seconds; null if there was none. */
export function mean(seconds, count) {
  return count > 0 ? (1000 * seconds) / count : null;
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
    first: before
      ? mean(
          gateway.first_token_seconds - before.gateway.first_token_seconds,
          gateway.first_token_count - before.gateway.first_token_count,
        )
      : null,
    between: same
      ? mean(engine.inter_token_seconds - old.inter_token_seconds, engine.inter_token_count - old.inter_token_count)
      : null,
  };
}

/** Share of looked-up prompt tokens that were cached, in percent; null before the first one. */
export function hitRate(engine) {
  return engine.prefix_query_tokens > 0 ? (100 * engine.prefix_hit_tokens) / engine.prefix_query_tokens : null;
}
