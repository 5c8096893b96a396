/* The hooks of advisor/recording/hooks.py once more, for their usual case only.

   A hook runs where the training step has filled the caches with its own things, and there a line
   of Python costs ten times what it costs in a loop: this is why these exist. Each has the Python
   hook that it stands for ("slow") and gives it every call that is not the usual one, so that
   there is one place that says what happens then. Both write the same tape; the tests compare.

   Not for free-threaded builds: two entries of the tape are appended one after the other, and
   nothing may come between them. The interpreter's lock sees to that. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>

enum { THREAD, PHASE, WATCHED, ONLINE, TOLD, HERE }; /* Tape.here */

enum { TIMED, FORWARD, UPLOAD, CUDA, NEXT, BEFORE, AFTER, KINDS };

/* Codes that each kind writes, by place. */
enum { BEGIN, OPENS, END, ELSE, STOPPED, BATCH, TOLD_OF, CODES };

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *original; /* what the user called */
    PyObject *slow;     /* the Python hook */
    PyObject *log, *here; /* of the tape */
    PyObject *left, *drain, *stepped; /* of the listener */
    PyObject *aid;      /* FORWARD: is_grad_enabled; NEXT: notes any batch; BEFORE, AFTER: opened */
    PyObject *code[CODES];
    PyObject *dict, *weak;
    unsigned long long inside; /* phases, as bits, that a call belongs to; AFTER: MAX_TAPE */
} Hook;

static PyObject *now; /* time.perf_counter_ns */
static PyObject *tensor; /* torch.Tensor */
static PyObject *device; /* torch.device */
static PyObject *s_is_cpu, *s_is_cuda, *s_type, *s_shape, *s_dtype, *s_loader;

/* -- errors ------------------------------------------------------------------------------------ */

/* What is ours may fail, and nobody hears of it. Not what is no Exception: somebody interrupts.
   0: no error is set any more; -1: that one is. */
static int
contained(void)
{
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyErr_Clear();
    return 0;
}

/* -- the tape ---------------------------------------------------------------------------------- */

static void
append(PyObject *log, PyObject *code, PyObject *value)
{
    if (PyList_Append(log, code) < 0) {
        PyErr_Clear();
    }
    else if (PyList_Append(log, value) < 0) {
        PyErr_Clear();
        Py_ssize_t size = PyList_GET_SIZE(log);
        if (PyList_SetSlice(log, size - 1, size, NULL) < 0) {
            PyErr_Clear();
        }
    }
}

static void
note(Hook *hook, PyObject *code)
{
    PyObject *time = PyObject_CallNoArgs(now);
    if (time == NULL) {
        PyErr_Clear();
        return;
    }
    append(hook->log, code, time);
    Py_DECREF(time);
}

static long
look(Hook *hook, int what)
{
    long value = PyLong_AsLong(PyList_GET_ITEM(hook->here, what));
    if (value == -1 && PyErr_Occurred()) {
        PyErr_Clear();
    }
    return value;
}

static int
in_thread(Hook *hook)
{
    PyObject *thread = PyList_GET_ITEM(hook->here, THREAD);
    return PyLong_AsUnsignedLongMask(thread) == PyThread_get_thread_ident();
}

/* Open a phase, or go back to one. Takes the reference. */
static void
turn(Hook *hook, PyObject *phase)
{
    PyObject *before = PyList_GET_ITEM(hook->here, PHASE);
    PyList_SET_ITEM(hook->here, PHASE, phase);
    Py_DECREF(before);
}

static PyObject *
enter(Hook *hook)
{
    PyObject *before = Py_NewRef(PyList_GET_ITEM(hook->here, PHASE));
    turn(hook, Py_NewRef(hook->code[OPENS]));
    return before;
}

/* -- what a call is ----------------------------------------------------------------------------- */

enum { PASS, USUAL, UNUSUAL, INTERRUPTED };

static int
usual(Hook *hook)
{
    if (!in_thread(hook)) {
        return PASS;
    }
    long phase = look(hook, PHASE);
    if (phase < 0 || phase > 63) {
        return UNUSUAL;
    }
    if (hook->inside >> phase & 1) {
        return PASS;
    }
    return look(hook, WATCHED) ? UNUSUAL : USUAL;
}

/* What a call is, by an attribute of the tensor that is moved: true or false. Of a subclass the
   Python hook asks: it does so behind the back of overrides. */
static int
by(PyObject *object, PyObject *name, int if_true, int if_false)
{
    if ((PyObject *)Py_TYPE(object) != tensor) {
        return UNUSUAL;
    }
    PyObject *value = PyObject_GetAttr(object, name);
    if (value == NULL) {
        return contained() < 0 ? INTERRUPTED : UNUSUAL;
    }
    int found = value == Py_True ? if_true : value == Py_False ? if_false : UNUSUAL;
    Py_DECREF(value);
    return found;
}

static int
starts_with_cpu(PyObject *text)
{
    return PyUnicode_GET_LENGTH(text) >= 3 && PyUnicode_READ_CHAR(text, 0) == 'c'
        && PyUnicode_READ_CHAR(text, 1) == 'p' && PyUnicode_READ_CHAR(text, 2) == 'u';
}

/* Tensor.to: from the host to a device? */
static int
uploads(PyObject *const *args, Py_ssize_t count)
{
    if (count < 2) {
        return UNUSUAL;
    }
    PyObject *target = args[1];
    if (PyUnicode_CheckExact(target)) {
        if (starts_with_cpu(target)) {
            return PASS;
        }
    }
    else if ((PyObject *)Py_TYPE(target) == device) {
        PyObject *type = PyObject_GetAttr(target, s_type);
        if (type == NULL) {
            return contained() < 0 ? INTERRUPTED : UNUSUAL;
        }
        if (!PyUnicode_Check(type)) {
            Py_DECREF(type);
            return UNUSUAL;
        }
        int host = PyUnicode_CompareWithASCIIString(type, "cpu") == 0;
        Py_DECREF(type);
        if (host) {
            return PASS;
        }
    }
    else {
        return UNUSUAL;
    }
    return by(args[0], s_is_cpu, USUAL, PASS);
}

/* -- wrappers ----------------------------------------------------------------------------------- */

#if PY_VERSION_HEX >= 0x030C0000
#define KEEP_ERROR PyObject *error = PyErr_GetRaisedException()
#define GIVE_ERROR_BACK PyErr_SetRaisedException(error)
#define DROP_ERROR Py_XDECREF(error)
#else
#define KEEP_ERROR PyObject *error, *value, *trace; PyErr_Fetch(&error, &value, &trace)
#define GIVE_ERROR_BACK PyErr_Restore(error, value, trace)
#define DROP_ERROR (Py_XDECREF(error), Py_XDECREF(value), Py_XDECREF(trace))
#endif

/* Somebody may have begun to watch during the call. No error may be set. -1: one is now. */
static int
tell_left(Hook *hook, PyObject *phase)
{
    if (look(hook, WATCHED)) {
        PyObject *done = PyObject_CallOneArg(hook->left, phase);
        Py_XDECREF(done);
        return done == NULL ? contained() : 0;
    }
    return 0;
}

static PyObject *
end_code(Hook *hook, int kind, PyObject *result)
{
    if (kind != FORWARD) {
        return hook->code[result == NULL ? ELSE : END];
    }
    PyObject *enabled = PyObject_CallNoArgs(hook->aid);
    PyObject *code = hook->code[enabled == Py_True ? END : ELSE];
    PyErr_Clear(); /* ours: the user's is kept */
    Py_XDECREF(enabled);
    return code;
}

static inline PyObject *
timed(Hook *hook, int kind, PyObject *const *args, size_t nargs, PyObject *names)
{
    int way = usual(hook);
    Py_ssize_t count = PyVectorcall_NARGS(nargs);
    if (way == USUAL && kind == UPLOAD) {
        way = uploads(args, count);
    }
    else if (way == USUAL && kind == CUDA) {
        way = count < 1 ? UNUSUAL : by(args[0], s_is_cuda, PASS, USUAL);
    }
    if (way == INTERRUPTED) {
        return NULL;
    }
    if (way != USUAL) {
        return PyObject_Vectorcall(way == PASS ? hook->original : hook->slow, args, nargs, names);
    }
    Py_INCREF(hook);
    PyObject *before = enter(hook);
    note(hook, hook->code[BEGIN]);
    PyObject *result = PyObject_Vectorcall(hook->original, args, nargs, names);
    KEEP_ERROR;
    turn(hook, Py_NewRef(before));
    note(hook, end_code(hook, kind, result));
    if (tell_left(hook, before) < 0) {
        Py_CLEAR(result);
        DROP_ERROR;
    }
    else {
        GIVE_ERROR_BACK;
    }
    Py_DECREF(before);
    Py_DECREF(hook);
    return result;
}

#define WRAPPER(name, kind)                                                                        \
    static PyObject *name(PyObject *self, PyObject *const *args, size_t nargs, PyObject *names)    \
    {                                                                                              \
        return timed((Hook *)self, kind, args, nargs, names);                                      \
    }
WRAPPER(call_timed, TIMED)
WRAPPER(call_forward, FORWARD)
WRAPPER(call_upload, UPLOAD)
WRAPPER(call_cuda, CUDA)

/* -- a loader's next ---------------------------------------------------------------------------- */

static PyObject *
shape_and_dtype(PyObject *of)
{
    PyObject *shape = PyObject_GetAttr(of, s_shape);
    PyObject *dtype = shape == NULL ? NULL : PyObject_GetAttr(of, s_dtype);
    PyObject *pair = dtype == NULL ? NULL : PyTuple_Pack(2, shape, dtype);
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    return pair;
}

/* What is noted of a batch of two tensors; NULL: it is none, or an error is set. */
static PyObject *
glance(PyObject *batch)
{
    PyObject **parts;
    if (PyList_CheckExact(batch) && PyList_GET_SIZE(batch) == 2) {
        parts = ((PyListObject *)batch)->ob_item;
    }
    else if (PyTuple_CheckExact(batch) && PyTuple_GET_SIZE(batch) == 2) {
        parts = ((PyTupleObject *)batch)->ob_item;
    }
    else {
        return NULL;
    }
    if ((PyObject *)Py_TYPE(parts[0]) != tensor || (PyObject *)Py_TYPE(parts[1]) != tensor) {
        return NULL;
    }
    PyObject *first = Py_NewRef(parts[0]), *second = Py_NewRef(parts[1]);
    PyObject *x = shape_and_dtype(first);
    PyObject *y = x == NULL ? NULL : shape_and_dtype(second);
    PyObject *both = y == NULL ? NULL : PyTuple_Pack(2, x, y);
    PyObject *found = both == NULL ? NULL : PyTuple_Pack(2, both, Py_None);
    Py_DECREF(first);
    Py_DECREF(second);
    Py_XDECREF(x);
    Py_XDECREF(y);
    Py_XDECREF(both);
    return found;
}

/* Which loader the batch is from, if it is another than before. -1: an error is set. */
static int
tell_loader(Hook *hook, PyObject *iterator)
{
    PyObject *number = PyObject_GetAttr(iterator, s_loader);
    if (number == NULL) {
        if (contained() < 0) {
            return -1;
        }
        number = PyLong_FromLong(-1);
    }
    PyObject *told = PyList_GET_ITEM(hook->here, TOLD);
    if (number != NULL && number != told) {
        int same = PyObject_RichCompareBool(number, told, Py_EQ);
        if (same == 0) {
            append(hook->log, hook->code[TOLD_OF], number);
            Py_INCREF(number);
            PyList_SetItem(hook->here, TOLD, number);
        }
    }
    Py_XDECREF(number);
    return contained();
}

static int
call(PyObject *function)
{
    PyObject *done = PyObject_CallNoArgs(function);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyObject *
call_next(PyObject *self, PyObject *const *args, size_t nargs, PyObject *names)
{
    Hook *hook = (Hook *)self;
    if (!in_thread(hook)) {
        return PyObject_Vectorcall(hook->original, args, nargs, names);
    }
    long phase = look(hook, PHASE);
    if (phase < 0 || phase > 63 || hook->inside >> phase & 1 || look(hook, WATCHED)
        || PyVectorcall_NARGS(nargs) != 1) {
        return PyObject_Vectorcall(hook->slow, args, nargs, names);
    }
    Py_INCREF(hook);
    PyObject *before = Py_NewRef(PyList_GET_ITEM(hook->here, PHASE));
    note(hook, hook->code[BEGIN]);
    turn(hook, Py_NewRef(hook->code[OPENS]));
    PyObject *batch = NULL;
    if (!look(hook, ONLINE) || call(hook->drain) == 0) {
        batch = PyObject_Vectorcall(hook->original, args, nargs, names);
    }
    if (batch == NULL) {
        int stopped = PyErr_ExceptionMatches(PyExc_StopIteration);
        KEEP_ERROR;
        turn(hook, Py_NewRef(before));
        note(hook, hook->code[stopped ? STOPPED : ELSE]);
        if (tell_left(hook, before) < 0) {
            DROP_ERROR;
        }
        else {
            GIVE_ERROR_BACK;
        }
        Py_DECREF(before);
        Py_DECREF(hook);
        return NULL;
    }
    turn(hook, Py_NewRef(before));
    PyObject *time = PyObject_CallNoArgs(now);
    PyObject *found = time == NULL ? NULL : glance(batch);
    int failed = contained() < 0, noted = time != NULL && !failed;
    if (found != NULL) {
        append(hook->log, hook->code[END], time);
        append(hook->log, hook->code[BATCH], found);
        Py_DECREF(found);
    }
    else if (noted) { /* it notes the end too, and contains what is ours */
        PyObject *done = PyObject_CallFunctionObjArgs(hook->aid, time, batch, NULL);
        failed = done == NULL;
        noted = done == Py_True;
        Py_XDECREF(done);
    }
    Py_XDECREF(time);
    if (noted) {
        failed = tell_loader(hook, args[0]) < 0 || tell_left(hook, before) < 0;
    }
    if (failed) {
        Py_CLEAR(batch);
    }
    Py_DECREF(before);
    Py_DECREF(hook);
    return batch;
}

/* -- around an optimizer's step ----------------------------------------------------------------- */

static PyObject *
call_before(PyObject *self, PyObject *const *args, size_t nargs, PyObject *names)
{
    Hook *hook = (Hook *)self;
    if (!in_thread(hook)) {
        Py_RETURN_NONE;
    }
    if (look(hook, WATCHED) || PyList_GET_SIZE(hook->aid) || PyVectorcall_NARGS(nargs) < 1) {
        return PyObject_Vectorcall(hook->slow, args, nargs, names);
    }
    PyObject *id = PyLong_FromVoidPtr(args[0]);
    PyObject *entry = id == NULL ? NULL
                                 : PyTuple_Pack(2, id, PyList_GET_ITEM(hook->here, PHASE));
    Py_XDECREF(id);
    if (entry != NULL && PyList_Append(hook->aid, entry) == 0) {
        turn(hook, Py_NewRef(hook->code[OPENS]));
        note(hook, hook->code[BEGIN]);
    }
    PyErr_Clear();
    Py_XDECREF(entry);
    Py_RETURN_NONE;
}

static PyObject *
call_after(PyObject *self, PyObject *const *args, size_t nargs, PyObject *names)
{
    Hook *hook = (Hook *)self;
    if (!in_thread(hook)) {
        Py_RETURN_NONE;
    }
    Py_ssize_t size = PyList_GET_SIZE(hook->aid);
    if (size == 0) {
        Py_RETURN_NONE;
    }
    if (look(hook, WATCHED)) {
        return PyObject_Vectorcall(hook->slow, args, nargs, names);
    }
    PyObject *entry = Py_NewRef(PyList_GET_ITEM(hook->aid, size - 1));
    if (!PyTuple_CheckExact(entry) || PyTuple_GET_SIZE(entry) != 2
        || PyList_SetSlice(hook->aid, size - 1, size, NULL) < 0) {
        Py_DECREF(entry);
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    turn(hook, Py_NewRef(PyTuple_GET_ITEM(entry, 1)));
    PyObject *time = PyObject_CallNoArgs(now);
    if (time != NULL) {
        append(hook->log, hook->code[BEGIN], PyTuple_GET_ITEM(entry, 0));
        append(hook->log, hook->code[END], time);
        Py_DECREF(time);
    }
    PyErr_Clear();
    Py_DECREF(entry);
    if (look(hook, ONLINE) || PyList_GET_SIZE(hook->log) > (Py_ssize_t)hook->inside) {
        Py_INCREF(hook);
        int failed = call(hook->stepped) < 0 || call(hook->drain) < 0;
        Py_DECREF(hook);
        if (failed) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

static const vectorcallfunc calls[KINDS] = {
    call_timed, call_forward, call_upload, call_cuda, call_next, call_before, call_after,
};

/* -- the type ----------------------------------------------------------------------------------- */

static int
traverse(PyObject *self, visitproc visit, void *arg)
{
    Hook *hook = (Hook *)self;
    Py_VISIT(hook->original);
    Py_VISIT(hook->slow);
    Py_VISIT(hook->log);
    Py_VISIT(hook->here);
    Py_VISIT(hook->left);
    Py_VISIT(hook->drain);
    Py_VISIT(hook->stepped);
    Py_VISIT(hook->aid);
    Py_VISIT(hook->dict);
    return 0;
}

static PyObject *
call_cleared(PyObject *self, PyObject *const *args, size_t nargs, PyObject *names)
{
    PyErr_SetString(PyExc_RuntimeError, "this hook was collected");
    return NULL;
}

static int
clear(PyObject *self)
{
    Hook *hook = (Hook *)self;
    hook->vectorcall = call_cleared;
    Py_CLEAR(hook->original);
    Py_CLEAR(hook->slow);
    Py_CLEAR(hook->log);
    Py_CLEAR(hook->here);
    Py_CLEAR(hook->left);
    Py_CLEAR(hook->drain);
    Py_CLEAR(hook->stepped);
    Py_CLEAR(hook->aid);
    Py_CLEAR(hook->dict);
    return 0;
}

static void
dealloc(PyObject *self)
{
    Hook *hook = (Hook *)self;
    PyObject_GC_UnTrack(self);
    if (hook->weak != NULL) {
        PyObject_ClearWeakRefs(self);
    }
    clear(self);
    for (int i = 0; i < CODES; i++) {
        Py_CLEAR(hook->code[i]);
    }
    Py_TYPE(self)->tp_free(self);
}

static PyObject *
create(PyTypeObject *type, PyObject *args, PyObject *names)
{
    int kind;
    unsigned long long inside;
    PyObject *original, *slow, *log, *here, *codes, *left, *drain, *stepped, *aid;
    if (names != NULL && PyDict_GET_SIZE(names) != 0) {
        PyErr_SetString(PyExc_TypeError, "Hook takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "iOOO!O!KO!(OOO)O:Hook", &kind, &original, &slow, &PyList_Type,
                          &log, &PyList_Type, &here, &inside, &PyTuple_Type, &codes, &left, &drain,
                          &stepped, &aid)) {
        return NULL;
    }
    Py_ssize_t given = PyTuple_GET_SIZE(codes);
    int optimizer = kind == BEFORE || kind == AFTER;
    int wanted = kind == NEXT ? CODES : ELSE + 1;
    if (now == NULL || kind < 0 || kind >= KINDS || given != wanted
        || PyList_GET_SIZE(here) != HERE || (optimizer && !PyList_CheckExact(aid))
        || !PyCallable_Check(slow) || !PyCallable_Check(left)
        || !PyCallable_Check(drain) || !PyCallable_Check(stepped)
        || !(optimizer || PyCallable_Check(original))) {
        PyErr_SetString(PyExc_ValueError, "not what a hook is made of");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < HERE + given; i++) {
        PyObject *number = i < HERE ? PyList_GET_ITEM(here, i) : PyTuple_GET_ITEM(codes, i - HERE);
        if (!PyLong_Check(number)) {
            PyErr_SetString(PyExc_TypeError, "numbers are expected");
            return NULL;
        }
    }
    Hook *hook = (Hook *)type->tp_alloc(type, 0);
    if (hook == NULL) {
        return NULL;
    }
    hook->vectorcall = calls[kind];
    hook->original = Py_NewRef(original);
    hook->slow = Py_NewRef(slow);
    hook->log = Py_NewRef(log);
    hook->here = Py_NewRef(here);
    hook->left = Py_NewRef(left);
    hook->drain = Py_NewRef(drain);
    hook->stepped = Py_NewRef(stepped);
    hook->aid = Py_NewRef(aid);
    hook->inside = inside;
    for (Py_ssize_t i = 0; i < given; i++) {
        hook->code[i] = Py_NewRef(PyTuple_GET_ITEM(codes, i));
    }
    return (PyObject *)hook;
}

/* As a function: read from an instance of a class, it is a method. */
static PyObject *
bind(PyObject *self, PyObject *object, PyObject *type)
{
    if (object == NULL || object == Py_None) {
        return Py_NewRef(self);
    }
    return PyMethod_New(self, object);
}

/* A hook is equal to what it stands for: torch tells overrides of Tensor.to (__torch_function__)
   which function was called, finds the hook in its place, and they look it up in tables. */

static PyTypeObject HookType;

static PyObject *
stands_for(PyObject *object)
{
    while (Py_TYPE(object) == &HookType && ((Hook *)object)->original != NULL
           && ((Hook *)object)->original != Py_None) {
        object = ((Hook *)object)->original;
    }
    return object;
}

static Py_hash_t
hash(PyObject *self)
{
    PyObject *other = stands_for(self);
    return other == self ? (Py_hash_t)((size_t)self >> 4) : PyObject_Hash(other);
}

static PyObject *
compare(PyObject *self, PyObject *other, int operation)
{
    if (operation != Py_EQ && operation != Py_NE) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    PyObject *one = stands_for(self), *two = stands_for(other);
    if (one == self && two == other) { /* no further to go: the same, or another's question */
        if (one == two) {
            return PyBool_FromLong(operation == Py_EQ);
        }
        Py_RETURN_NOTIMPLEMENTED;
    }
    return PyObject_RichCompare(one, two, operation);
}

/* By name, as functions; methods of C tell themselves how. */
static PyObject *
reduce(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    PyObject *original = stands_for(self);
    if (original == self || PyFunction_Check(original)) {
        return PyObject_GetAttrString(self, "__qualname__");
    }
    return PyObject_CallMethod(original, "__reduce__", NULL);
}

static PyMethodDef methods[] = {
    {"__reduce__", reduce, METH_NOARGS, NULL},
    {NULL},
};

static PyGetSetDef attributes[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL},
};

static PyTypeObject HookType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "advisor.recording._quick.Hook",
    .tp_basicsize = sizeof(Hook),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL
        | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_new = create,
    .tp_dealloc = dealloc,
    .tp_traverse = traverse,
    .tp_clear = clear,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Hook, vectorcall),
    .tp_dictoffset = offsetof(Hook, dict),
    .tp_weaklistoffset = offsetof(Hook, weak),
    .tp_hash = hash,
    .tp_richcompare = compare,
    .tp_methods = methods,
    .tp_getset = attributes,
    .tp_descr_get = bind,
};

/* -- the module --------------------------------------------------------------------------------- */

static PyObject *
set_up(PyObject *module, PyObject *args)
{
    PyObject *a, *b, *c;
    if (!PyArg_ParseTuple(args, "OOO:set_up", &a, &b, &c)) {
        return NULL;
    }
    Py_XSETREF(now, Py_NewRef(a));
    Py_XSETREF(tensor, Py_NewRef(b));
    Py_XSETREF(device, Py_NewRef(c));
    Py_RETURN_NONE;
}

static PyObject *
thread(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    return PyLong_FromUnsignedLong(PyThread_get_thread_ident());
}

static PyMethodDef functions[] = {
    {"thread", thread, METH_NOARGS, "The thread that calls, as hooks tell it."},
    {"set_up", set_up, METH_VARARGS, "set_up(perf_counter_ns, Tensor, device): before all else."},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_quick",
    .m_doc = "The recorder's hooks in their usual case.",
    .m_size = -1,
    .m_methods = functions,
};

static int
intern(PyObject **name, const char *text)
{
    *name = PyUnicode_InternFromString(text);
    return *name != NULL;
}

PyMODINIT_FUNC
PyInit__quick(void)
{
#ifdef Py_GIL_DISABLED
    PyErr_SetString(PyExc_ImportError, "needs the interpreter's lock");
    return NULL;
#else
    if (!(intern(&s_is_cpu, "is_cpu") && intern(&s_is_cuda, "is_cuda") && intern(&s_type, "type")
          && intern(&s_shape, "shape") && intern(&s_dtype, "dtype")
          && intern(&s_loader, "_advisor_loader"))) {
        return NULL;
    }
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || PyModule_AddType(module, &HookType) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
#endif
}
