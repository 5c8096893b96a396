// Entry point of the timeline. TimelineData requests data, Painter draws, Input handles pointer,
// wheel and keys, Panel shows text and controls, and Timeline connects them.

import "./deferred_scripts.js";
import { start, state } from "./mount.js";

Object.assign(window, { advisorTimeline: state });
start();
