// The timeline: Data (what the server said), Paint (pixels), Input (pointer, wheel, keys), Panel
// (text beside the picture) and Timeline, which ties them. This file sets it going.

import "./last.js";
import { start, state } from "./place.js";

Object.assign(window, { advisorTimeline: state });
start();
