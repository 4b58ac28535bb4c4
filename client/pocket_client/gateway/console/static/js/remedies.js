// What a person can do about an error, by the gateway's code or status.

const BY_CODE = {
  context_length_exceeded: "Start a new chat, or shorten the message or the longest answer.",
  invalid_api_key: "Enter a key of this gateway (API key, top right).",
  host_not_allowed: "Open this page by its address or localhost, or start the gateway with --allowed-host.",
  model_not_found: "Reload the page: the server now serves another model.",
  rate_limit_exceeded: "Wait a little, then try again.",
  overloaded: "The server is busy. Try again in a few seconds.",
  upstream_unavailable: "The model server is away or restarting. Try again in a moment.",
  not_ready: "The model server is still starting. Try again in a moment.",
  timeout: "Ask for a shorter answer, or try again when the server is less busy.",
  body_too_large: "Shorten the message or start a new chat.",
  request_cancelled: "It was cancelled by its id. Try again if that was not you.",
};

const BY_STATUS = {
  0: "Check that the gateway runs. This page tries again by itself.",
  400: "Change the settings or the message, then try again.",
  500: "Try again; if it happens again, the gateway's log says more.",
  502: "The part above is all that came. Try again.",
};

export function remedyOf(status, code) {
  return BY_CODE[code] ?? BY_STATUS[status] ?? BY_STATUS[500];
}
